"""Jobs of ranks with a part of a core each: their turns, what later ones learn of earlier ones, control groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import limited_ranks


def test_jobs_take_turns_and_what_one_has_shown_is_given_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        own = command[command.index("benchmarks.any") + 1 :]
        options = limited_ranks.parser("benchmarks.any", None, ["a", "b"], batch_size=8).parse_args(own[:6])
        options.result.write_text(json.dumps({"step_ms": 1.5}))
        given.append([options.job, options.seconds, *own[6:]])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["any.py", "--seconds", "2"])
    extra: list[str] = []
    for name, result in limited_ranks.take_turns("benchmarks.any", ["a", "b"], rounds=2, extra=extra):
        assert result == {"step_ms": 1.5}
        extra[:] = [f"after {name}"]
    assert given == [["a", 2.0], ["b", 2.0, "after a"], ["a", 2.0, "after b"], ["b", 2.0, "after a"]]


def test_a_job_that_fails_ends_the_benchmark_with_the_end_of_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess(["horovodrun"], 3, stderr="no control groups")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match=r"a: exit status 3\nno control groups"):
        next(limited_ranks.take_turns("benchmarks.any", ["a"], rounds=1))


@pytest.mark.parametrize(
    ("inside", "files"),
    [("cpu", {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "4000"}), ("", {"cpu.max": "4000 10000"})],
    ids=["first version", "second version"],
)
def test_a_rank_gets_a_control_group_of_its_own_with_its_part_of_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str, files: dict[str, str]
) -> None:
    (tmp_path / inside).mkdir(exist_ok=True)
    monkeypatch.setattr(limited_ranks, "_GROUPS", tmp_path)
    limited_ranks.limit(3, 0.4)
    (folder,) = (tmp_path / inside).iterdir()
    assert folder.name.endswith("-3")
    assert {each.name: each.read_text() for each in folder.iterdir()} == {**files, "cgroup.procs": str(os.getpid())}


def test_medians_are_shown_as_multiples_of_the_first_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    limited_ranks.print_medians({"equal": [1.0, 9.0, 2.0], "one is slow": [4.0]}, unit="ms")
    assert capsys.readouterr().out == "equal            2.0 ms,  1.00 x\none is slow      4.0 ms,  2.00 x\n"
