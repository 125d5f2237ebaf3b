""".ci/run on a made-up project: every step runs, any failure fails it, and the closing lines come last."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent.parent


STEPS = 10


def run(tree: Path, *, blocks: str = "true", minutes: int = 14, install: str = "0", **recipes: str) -> tuple[int, str]:
    (tree / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tree / ".ci")
    lines = {
        "test": "echo '== 7 passed, 1 skipped in 2.00s =='; ",
        "tooling": "",
        "keras-unit": "",
        "standin": "",
        "engines": "",
        "models": "",
        "docs": "",
        "docker-test": "",
        "test-packages": "",
        "packages": "",
    }
    targets = [f"{name}:\n\t@{line}{recipes.get(name, 'true')}\n" for name, line in lines.items()]
    # The folder docs is there, as in the project.
    (tree / "Makefile").write_text(f".PHONY: {' '.join(lines)}\n{''.join(targets)}")
    (tree / "docs").mkdir()
    python = tree / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho '2 passed, 0 failed'\n{blocks}\n")
    python.chmod(0o755)
    environment = {**os.environ, "HVDTRAIN_CI_MINUTES": str(minutes), "HVDTRAIN_CI_INSTALL": install}
    result = subprocess.run([tree / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60)
    return result.returncode, result.stdout


def test_all_green_ends_with_the_closing_lines(tmp_path: Path) -> None:
    status, output = run(tmp_path)
    assert status == 0
    summary = output.partition("===== summary =====")[2].splitlines()
    assert any("ok     make --keep-going test" in line for line in summary)
    assert any("== 7 passed, 1 skipped in 2.00s" in line for line in summary)
    assert any(line.strip() == "2 passed, 0 failed" for line in summary)
    assert summary[-1] == "all steps passed"


@pytest.mark.parametrize(
    "step",
    ["test", "packages", "tooling", "keras-unit", "standin", "models", "blocks", "engines", "docs", "docker-test"],
)
def test_one_failing_step_fails_the_run_after_all_have_run(tmp_path: Path, step: str) -> None:
    status, output = run(tmp_path, **{step: "false"})
    assert status == 1
    summary = output.partition("===== summary =====")[2].splitlines()
    assert sum(line.startswith("FAILED") for line in summary) == 1
    assert sum(line.startswith("ok ") for line in summary) == STEPS - 1
    assert summary[-1] == f"1 of {STEPS} steps failed"


def test_steps_beside_others_that_end_without_a_result_fail_the_run(tmp_path: Path) -> None:
    lane = "kill -9 $$(ps -o ppid= -p $$(ps -o ppid= -p $$(ps -o ppid= -p $$$$)))"  # of make, which timeout started
    status, output = run(tmp_path, **{"keras-unit": lane})
    assert status == 1
    assert re.search("^FAILED the (first|second) lane ended with status 137$", output.partition("= summary =")[2], re.M)


def test_what_runs_beside_another_step_is_printed_apart_from_it(tmp_path: Path) -> None:
    steps = ("models", "engines")
    _, output = run(tmp_path, **{name: f"echo {name} begin; sleep 1; echo {name} end" for name in steps})
    for name in steps:
        assert f"===== make {name} =====\n{name} begin\n{name} end\n" in output


@pytest.mark.parametrize(("needed_gb", "is_memory"), [("0", os.geteuid() == 0), ("999999", False)])
def test_tests_write_to_memory_where_there_is_room_and_leave_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed_gb: str, is_memory: bool
) -> None:
    given = tmp_path / "given"
    given.mkdir()
    monkeypatch.setenv("HVDTRAIN_CI_MEMORY_GB", needed_gb)
    monkeypatch.setenv("TMPDIR", str(given))
    # CI's own folder of tests is memory too: what tells them apart is where it is mounted.
    _, output = run(tmp_path, test="df --output=fstype,target $$TMPDIR; echo in $$TMPDIR; touch $$TMPDIR/left")
    (name,) = re.findall(r"^in (\S+)$", output, re.M)
    assert Path(name).parent == (given if is_memory else tmp_path)
    assert bool(re.search(rf"^tmpfs +{name}$", output, re.M)) == is_memory
    assert os.listdir(given) == ([] if is_memory else ["left"])


def test_steps_without_time_left_are_failures_in_a_summary_that_is_there(tmp_path: Path) -> None:
    status, output = run(tmp_path, minutes=0)
    assert status == 1
    assert "not started" in output
    assert output.splitlines()[-1] == f"{STEPS - 1} of {STEPS - 1} steps failed"


def test_the_image_is_left_out_with_a_line_where_its_time_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDTRAIN_CI_GOAL_MINUTES", "12")
    status, output = run(tmp_path, **{"docker-test": "false"})
    assert status == 0, output
    summary = output.partition("===== summary =====")[2].splitlines()
    (line,) = [line for line in summary if line.startswith("left out")]
    assert re.fullmatch(
        r"left out make docker-test BASE=bookworm WHEELS=host: it takes 13 minutes, and 1[12] were left", line
    )
    assert summary[-1] == "all steps passed"


def test_the_whole_ends_within_the_hour_and_a_half_that_ci_allows() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    found = re.search(r"HVDTRAIN_CI_MINUTES:-(\d+)", script)
    assert found is not None
    assert int(found[1]) < 90
    assert len(re.findall(r"^ *(?:\"|TMPDIR=\S+ )?step(?:_if_time \d+)? \d+ ", script, re.M)) == STEPS + 1  # and root's


@pytest.mark.parametrize("failing", ["", "unit-all", "jobs"])
def test_unit_tests_beside_jobs_are_printed_after_them_and_either_fails_both(tmp_path: Path, failing: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^unit-and-jobs: .*?\n\n", makefile, re.M | re.S)
    assert recipe is not None
    others = "".join(
        f"{name}:\n\t@echo of {name}\n\t@{'false' if name == failing else 'true'}\n" for name in ("unit-all", "jobs")
    )
    (tmp_path / "Makefile").write_text(f"{recipe[0].replace('$(STAMP)', '')}{others}")
    command = ["make", "unit-and-jobs"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (result.returncode == 0) == (not failing)
    assert result.stdout.index("of jobs") < result.stdout.index("of unit-all")


def test_where_it_may_install_packages_a_skip_for_want_of_one_is_a_failure(tmp_path: Path) -> None:
    status, output = run(tmp_path, install="1", test='[ "$$HVDTRAIN_TEST_INSTALLED" = 1 ]')
    assert status == 0, output
    assert output.partition("===== summary =====")[2].splitlines()[1].startswith("ok     make test-packages")


def test_the_closing_lines_say_how_many_tests_were_skipped_and_why(tmp_path: Path) -> None:
    skips = "echo 'SKIPPED [3] tests/a.py:12: no sshd'; echo 'SKIPPED [1] tests/b.py:7: Skipped: no sshd: none'"
    _, output = run(
        tmp_path, test=f"{skips}; echo '  skipped 12: not on torch'; echo 'SKIPPED [2] tests/c.py: no sshd'"
    )
    summary = output.partition("===== summary =====")[2]
    assert "18 tests skipped:\n  12: not on torch\n  5: no sshd\n  1: Skipped: no sshd: none\n" in summary
