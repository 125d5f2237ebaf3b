from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch import slurm

JOB = {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n[1-3,7]", "SLURM_TASKS_PER_NODE": "2(x3),1"}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program called scontrol first on PATH: Slurm's answer for JOB."""
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\n[ "$3" = "n[1-3,7]" ] && printf "n1\\nn2\\nn3\\nn7\\n" || echo "$3"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return program


@pytest.mark.usefixtures("scontrol")
def test_a_slurm_jobs_nodes_and_tasks_are_its_hosts_and_slots() -> None:
    given = slurm.hosts(JOB)
    assert given == {"n1": 2, "n2": 2, "n3": 2, "n7": 1}
    assert slurm.listed(given) == "n1:2,n2:2,n3:2,n7:1"
    slurm.check_ranks(7, given)
    with pytest.raises(UsageError, match=r"-np 8 is more than the 7 tasks of this Slurm job on n1:2.*ntasks-per-node"):
        slurm.check_ranks(8, given)


def test_outside_of_slurm_and_on_the_only_node_there_is_nothing_to_name() -> None:
    one = {"SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "2"}
    assert slurm.hosts({}) == {}
    assert slurm.hosts({**one, "SLURM_JOB_NODELIST": socket.gethostname()}) == {}
    assert slurm.hosts({**one, "SLURM_JOB_NODELIST": "n5", "SLURMD_NODENAME": "n5"}) == {}


@pytest.mark.usefixtures("scontrol")
def test_the_only_node_of_a_job_that_was_asked_for_on_a_login_node_is_named() -> None:
    one = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n5", "SLURM_TASKS_PER_NODE": "2"}
    assert slurm.hosts(one) == {"n5": 2}


def test_nodes_that_slurm_does_not_tell_are_to_be_named(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"names 4 nodes .* tasks for 2 .*-H host1:2"):
        slurm.hosts({**JOB, "SLURM_TASKS_PER_NODE": "2(x2)"})
    scontrol.unlink()
    monkeypatch.setenv("PATH", str(scontrol.parent))
    with pytest.raises(UsageError, match=r"4 nodes, n\[1-3,7\].*-H host1:2"):
        slurm.hosts(JOB)
