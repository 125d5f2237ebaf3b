""".ci/run on a made-up project: every step runs, any failure fails it, and the closing lines come last."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def run(tree: Path, *, test: str = "true", blocks: str = "true", docker: str = "true") -> tuple[int, str]:
    (tree / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tree / ".ci")
    test_recipe = f"test:\n\t@echo '== 7 passed, 1 skipped in 2.00s =='\n\t@{test}\n"
    (tree / "Makefile").write_text(f"{test_recipe}docker-test:\n\t@{docker}\n")
    python = tree / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho '2 passed, 0 failed'\n{blocks}\n")
    python.chmod(0o755)
    result = subprocess.run([tree / ".ci" / "run"], capture_output=True, text=True, timeout=60)
    return result.returncode, result.stdout


def test_all_green_ends_with_the_closing_lines(tmp_path: Path) -> None:
    status, output = run(tmp_path)
    assert status == 0
    summary = output.partition("===== summary =====")[2].splitlines()
    assert any("ok     make test" in line for line in summary)
    assert any("== 7 passed, 1 skipped in 2.00s" in line for line in summary)
    assert any(line.strip() == "2 passed, 0 failed" for line in summary)
    assert summary[-1] == "all steps passed"


@pytest.mark.parametrize("step", ["test", "blocks", "docker"])
def test_one_failing_step_fails_the_run_after_all_have_run(tmp_path: Path, step: str) -> None:
    status, output = run(tmp_path, **{step: "false"})
    assert status == 1
    summary = output.partition("===== summary =====")[2].splitlines()
    assert sum(line.startswith("FAILED") for line in summary) == 1
    assert sum(line.startswith("ok ") for line in summary) == 2
    assert summary[-1] == "1 of 3 steps failed"


def test_the_steps_limits_leave_room_in_the_hour_and_a_half_that_ci_allows() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    limits = [int(line.split()[1]) for line in lines if line.startswith("step ")]
    assert len(limits) == 3
    assert sum(limits) < 90
