"""Frameworks' start-up notes are left out, their warnings are not, and the user's settings win."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.system import log_filter

NOTES = [
    "I0000 00:00:1795278941.822493    1821 port.cc:153] oneDNN custom operations are on.",
    "2025-09-17 14:44:05.157831: I external/local_xla/xla/tsl/cuda/cudart_stub.cc:32] Could not find cuda drivers",
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
]
OTHERS = [
    "E0000 00:00:1795278946.540770    1821 cuda_platform.cc:52] failed call to cuInit",
    "2025-09-17 14:44:05.176998: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:467] Unable to register",
    "W0000 00:00:1795279076.732141    3925 logging_ops.cc:171] W",
    "UserWarning: I0000 00:00: is a quotation",
    "",
]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings, no TensorFlow, nobody who listens for it."""
    for name in (log_filter.QUIET, log_filter.LEVEL):
        monkeypatch.setenv(name, "")  # so that what is set here is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(log_filter, "_set_here", False)
    monkeypatch.setitem(sys.modules, "tensorflow", sys)  # so that what a test imports by this name is taken back
    monkeypatch.delitem(sys.modules, "tensorflow")
    monkeypatch.setattr(
        sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, log_filter._TensorFlowFinder)]
    )


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module by the name of tensorflow that prints such lines when it is imported."""
    text = "\n".join([*NOTES, *OTHERS])
    (tmp_path / "tensorflow.py").write_text(
        f"import os\nos.write(2, {text!r}.encode() + b'\\n')\nos.getpid()\nready = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "tensorflow.py"


def test_of_an_import_only_notes_are_left_out(package: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log_filter.begin()
    assert importlib.util.find_spec("tensorflow") is not None  # asking where it is, is not an import
    assert importlib.import_module("tensorflow").ready == 1
    os.write(2, f"{NOTES[0]} after\n".encode())
    assert capfd.readouterr().err.splitlines() == [*OTHERS, f"{NOTES[0]} after"]
    assert os.environ[log_filter.LEVEL] == "1"
    assert log_filter.LEVEL not in log_filter.without_ours(os.environ)  # what `doctor --report` shows of it


def test_what_is_printed_before_a_crash_comes_through(package: Path) -> None:
    package.write_text(package.read_text().replace("os.getpid()", "os.abort()"))
    code = "import hvdtrain, tensorflow"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.splitlines()) == (-6, OTHERS)


def test_an_exception_of_the_import_is_the_callers_and_the_stream_is_restored(
    package: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    package.write_text(package.read_text() + "raise ImportError('no such library')\n")
    log_filter.begin()
    with pytest.raises(ImportError, match="no such library"):
        importlib.import_module("tensorflow")
    os.write(2, f"{NOTES[0]}\n".encode())
    assert capfd.readouterr().err.splitlines() == [*OTHERS, NOTES[0]]


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [(log_filter.QUIET, "0", None), (log_filter.LEVEL, "0", "0")],
    ids=["HVDTRAIN_QUIET=0", "level 0"],
)
def test_either_setting_of_the_users_turns_all_of_it_on(
    package: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    level: str | None,
) -> None:
    monkeypatch.setenv(name, value)
    log_filter.begin()
    importlib.import_module("tensorflow")
    assert capfd.readouterr().err.splitlines() == [*NOTES, *OTHERS]
    assert os.environ.get(log_filter.LEVEL) == level
    assert not log_filter.wanted()


def test_a_level_of_the_users_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log_filter.LEVEL, "3")
    log_filter.begin()
    assert os.environ[log_filter.LEVEL] == log_filter.without_ours(os.environ)[log_filter.LEVEL] == "3"


def test_without_grep_everything_is_shown(
    package: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log_filter.begin()
    monkeypatch.setenv("PATH", "")
    importlib.import_module("tensorflow")
    assert capfd.readouterr().err.splitlines() == [*NOTES, *OTHERS]


def test_a_program_without_a_stream_for_errors_can_import_it(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_filter.begin()
    monkeypatch.setattr(sys, "stderr", None)
    assert importlib.import_module("tensorflow").ready == 1


@pytest.mark.parametrize("line", [*NOTES, *OTHERS])
def test_a_launcher_tells_notes_from_the_rest(line: str) -> None:
    assert bool(log_filter.is_note(line)) == (line in NOTES)


@pytest.mark.slow
def test_tensorflow_itself_starts_without_a_word_and_its_warnings_come_through() -> None:
    pytest.importorskip("tensorflow")
    code = (
        "import hvdtrain, tensorflow as tf\n"
        "log = tf.compat.v1.logging\n"
        "for text, level in (('note', log.INFO), ('warning', log.WARN), ('error', log.ERROR)):\n"
        "    tf.print(text, output_stream=level)\n"
    )
    # TensorFlow loads Keras, and Keras torch where it is the backend, as in these tests: both bring LLVM.
    left_out = (log_filter.QUIET, log_filter.LEVEL, "KERAS_BACKEND")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    # absl's remark comes before its first message of any level: before the warning here, unless a note came earlier.
    remark = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
    lines = [line for line in done.stderr.splitlines() if line and line != remark]
    assert [line.split()[-1] for line in lines] == ["warning", "error"], done.stderr
