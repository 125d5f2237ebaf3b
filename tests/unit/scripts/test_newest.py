from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import create_autospec

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, on a machine where everything can be installed at once."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import newest

    # Stand-ins that take what the real ones take.
    for name in ("check_tools", "make_venv", "install_mpi", "install"):
        monkeypatch.setattr(newest, name, create_autospec(getattr(newest, name)))
    monkeypatch.setattr(newest, "facts", lambda setup: {"python": "3.13.0", "torch": "9.0", "Open MPI": ""})
    return newest


def outcomes(monkeypatch: pytest.MonkeyPatch, newest: ModuleType, *, build: int, tests: int) -> None:
    def run(setup: object, command: list[object]) -> tuple[int, str]:
        return (build, "no compiler") if "build" in command else (tests, f"9 passed, {tests} failed")

    monkeypatch.setattr(newest, "run", run)


@pytest.mark.parametrize(
    ("build", "tests", "status", "result"),
    [
        (0, 0, 0, "9 passed, 0 failed in 0 s"),
        (0, 1, 1, "9 passed, 1 failed in 0 s"),
        (1, 0, 1, "hvdtrain build failed: no compiler"),
    ],
)
def test_what_came_of_it_is_a_row_a_file_and_the_exit_status(
    newest: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    build: int,
    tests: int,
    status: int,
    result: str,
) -> None:
    outcomes(monkeypatch, newest, build=build, tests=tests)
    assert newest.main(["--venv", str(tmp_path / "newest")]) == status
    report = json.loads((tmp_path / "newest.json").read_text())
    assert (report["passed"], report["result"]) == (status == 0, result)
    assert capsys.readouterr().out.endswith(f"| {report['date']} | python 3.13.0, torch 9.0 | {result} |\n")


def test_a_command_is_shown_and_its_last_line_kept(
    newest: ModuleType, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    code = "import sys; print('one'); print('two', file=sys.stderr, flush=True); sys.exit(3)"
    setup = SimpleNamespace(python=Path(sys.executable))
    assert newest.run(setup, [sys.executable, "-u", "-c", code]) == (3, "two")
    assert capfdbinary.readouterr().out == b"one\ntwo\n"
