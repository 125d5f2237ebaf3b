"""The defects of `make mutants` fit the code of today, and their commands are parts of `make test`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
import mutants  # noqa: E402


@pytest.mark.parametrize("defect", mutants.DEFECTS, ids=lambda defect: defect.name)
def test_what_a_defect_replaces_stands_once_in_its_file(defect: mutants.Defect) -> None:
    assert (ROOT / defect.file).read_text(encoding="utf-8").count(defect.before) == 1, defect.file
    assert defect.after != defect.before
    for word in defect.command:
        assert not word.startswith("tests/") or (ROOT / word).exists(), word


def test_there_are_enough_of_them() -> None:
    assert len(mutants.DEFECTS) >= 30
    assert len({defect.name for defect in mutants.DEFECTS}) == len(mutants.DEFECTS)


def test_a_defect_that_no_test_catches_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "code.py").write_text("right = 1\n")
    passes = (sys.executable, "-c", "")
    fails = (sys.executable, "-c", "from code import right; assert right == 1")
    known = mutants.Defect("known", "code.py", "right = 1", "right = 2", fails)
    unknown = mutants.Defect("unknown", "code.py", "right = 1", "right = 2", passes)
    (tmp_path / "code.py").write_text("right = 1\n")
    assert mutants.look([known, unknown], tmp_path) == 1
    printed = capsys.readouterr().out
    assert "caught known" in printed
    assert "ALIVE  unknown" in printed
    assert (tmp_path / "code.py").read_text() == "right = 1\n"


def test_a_command_that_fails_without_a_defect_is_refused(tmp_path: Path) -> None:
    defect = mutants.Defect("any", "code.py", "a", "b", (sys.executable, "-c", "raise SystemExit(1)"))
    with pytest.raises(SystemExit, match="would catch nothing"):
        mutants.look([defect], tmp_path)
