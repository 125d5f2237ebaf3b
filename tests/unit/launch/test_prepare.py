from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch import arguments, prepare
from hvdtrain.launch.arguments import LaunchSpec

THERE = {"localhost": 1, "198.51.100.1": 2, "198.51.100.2": 1}
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
    given = prepare.slurm_hosts(JOB)
    assert given == {"n1": 2, "n2": 2, "n3": 2, "n7": 1}
    assert arguments.listed(given) == "n1:2,n2:2,n3:2,n7:1"


def test_outside_of_slurm_and_on_the_only_node_there_is_nothing_to_name() -> None:
    one = {"SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "2"}
    assert prepare.slurm_hosts({}) == {}
    assert prepare.slurm_hosts({**one, "SLURM_JOB_NODELIST": socket.gethostname()}) == {}
    assert prepare.slurm_hosts({**one, "SLURM_JOB_NODELIST": "n5", "SLURMD_NODENAME": "n5"}) == {}


@pytest.mark.usefixtures("scontrol")
def test_the_only_node_of_a_job_that_was_asked_for_on_a_login_node_is_named() -> None:
    one = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n5", "SLURM_TASKS_PER_NODE": "2"}
    assert prepare.slurm_hosts(one) == {"n5": 2}


def test_nodes_that_slurm_does_not_tell_are_to_be_named(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"tasks for 2 nodes .* names 4. .*-H host1:2"):
        prepare.slurm_hosts({**JOB, "SLURM_TASKS_PER_NODE": "2(x2)"})
    scontrol.unlink()
    monkeypatch.setenv("PATH", str(scontrol.parent))
    with pytest.raises(UsageError, match=r"tasks for 4 nodes .*n\[1-3,7\]` names 0 .*-H host1:2"):
        prepare.slurm_hosts(JOB)


@pytest.mark.parametrize(
    ("hosts", "flags"),
    [("localhost:2", ["--network-interfaces", "lo"]), ("localhost:1\\n192.0.2.77:1", [])],
)
def test_an_elastic_job_of_one_host_is_told_its_interface(hosts: str, flags: list[str]) -> None:
    script = f"printf '{hosts}\\n'"
    assert prepare.elastic_flags(["--host-discovery-script", script]) == flags


def test_the_users_own_interface_stays() -> None:
    passed = ["--host-discovery-script", "echo localhost:2", "--network-interfaces", "eth0"]
    assert prepare.elastic_flags(passed) == []
    assert prepare.elastic_flags(["-H", "localhost:2"]) == []


def test_a_discovery_script_that_fails_is_named() -> None:
    with pytest.raises(UsageError, match=r"echo no; exit 3 failed with status 3"):
        prepare.elastic_flags(["--host-discovery-script", "echo no; exit 3"])


def test_ranks_fill_one_host_after_the_other() -> None:
    spec = LaunchSpec(ranks=3, hosts=THERE)
    assert prepare.by_rank(spec, own="me") == ("me", "198.51.100.1", "198.51.100.1")
    assert prepare.by_rank(replace(spec, elastic=True), own="me") == ("", "", "")


@pytest.mark.parametrize(
    ("options", "expected"),
    [("--bind-to none --map-by slot", True), ("--map-by node", False), ("-npernode 2", False), ("", True)],
)
def test_mpirun_may_be_told_to_fill_them_otherwise(options: str, expected: bool) -> None:
    found = prepare.by_rank(LaunchSpec("mpirun", 3, options.split(), THERE), own="me")
    assert found == (("me", "198.51.100.1", "198.51.100.1") if expected else ("", "", ""))
