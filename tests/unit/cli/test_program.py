from __future__ import annotations

import subprocess
import sys

import pytest

from hvdtrain.cli import program
from hvdtrain.errors import HvdTrainError
from hvdtrain.horovod_build import build as steps
from hvdtrain.horovod_build.build import BuildOptions


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str | int | None:
    """Run the command line in this process and return its exit status or message."""
    monkeypatch.setattr(sys, "argv", ["hvdtrain", *arguments])
    with pytest.raises(SystemExit) as info:
        program.main()
    return info.value.code


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[BuildOptions]:
    options: list[BuildOptions] = []
    monkeypatch.setattr(steps, "build", options.append)
    monkeypatch.delenv("HVDTRAIN_MPI", raising=False)
    return options


def test_help_imports_no_framework() -> None:
    code = (
        "import sys; sys.argv = ['hvdtrain', '--help']\n"
        "from hvdtrain.cli import program as cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'tensorflow', 'keras', 'jax', 'horovod', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "build" in done.stdout
    assert "doctor" in done.stdout


def test_options_reach_the_build(monkeypatch: pytest.MonkeyPatch, asked: list[BuildOptions]) -> None:
    arguments = ["build", "--without", "mpi", "--without", "torch", "--rebuild", "--force", "--cuda-arch", "90"]
    assert call(monkeypatch, *arguments, "--jobs", "3", "--no-install") == 0
    expected = BuildOptions(
        without=frozenset({"mpi", "torch"}), rebuild=True, force=True, cuda_arch="90", jobs=3, install=False
    )
    assert asked == [expected]


def test_the_environment_can_leave_mpi_out(monkeypatch: pytest.MonkeyPatch, asked: list[BuildOptions]) -> None:
    monkeypatch.setenv("HVDTRAIN_MPI", "0")
    assert call(monkeypatch, "build") == 0
    assert asked == [BuildOptions(without=frozenset({"mpi"}))]


@pytest.mark.parametrize("error", [HvdTrainError("no compiler here"), OSError(28, "No space left on device", "/x")])
def test_a_known_error_is_one_message_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(options: BuildOptions) -> None:
        raise error

    monkeypatch.setattr(steps, "build", fail)
    assert call(monkeypatch, "build") == 1
    assert capsys.readouterr().err == f"hvdtrain build: {error}\n"


def test_doctors_verdict_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdtrain.tools import doctor

    seen: list[dict[str, object]] = []
    monkeypatch.setattr(doctor, "run", lambda **options: seen.append(options) or 1)
    assert call(monkeypatch, "doctor", "--json") == 1
    assert call(monkeypatch, "doctor", "--report") == 1
    assert call(monkeypatch, "doctor", "--no-allreduce") == 1
    assert call(monkeypatch, "doctor", "--gpu") == 1
    assert [(each["as_json"], each["report"], each["allreduce"], each["gpu"]) for each in seen] == [
        (True, False, True, False),
        (False, True, True, False),
        (False, False, False, False),
        (False, False, True, True),
    ]
