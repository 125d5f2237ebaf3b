from __future__ import annotations

from dataclasses import replace

import pytest

from hvdtrain.launch import other_hosts
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.launch.other_hosts import SshRoute

THERE = {"localhost": 1, "198.51.100.1": 2, "198.51.100.2": 1}
LIMITS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


@pytest.mark.parametrize(
    ("launcher", "options", "environment", "ssh"),
    [
        ("horovodrun", "", {}, ("ssh", *LIMITS, "-o", "StrictHostKeyChecking=accept-new")),
        (
            "horovodrun", "-p 2222 --ssh-identity-file=key", {},
            ("ssh", *LIMITS, "-o", "StrictHostKeyChecking=accept-new", "-p", "2222", "-i", "key"),
        ),
        ("mpirun", "", {}, ("ssh", "-x", *LIMITS)),
        ("mpirun", "", {"OMPI_MCA_plm_rsh_args": "-p 2222"}, ("ssh", "-x", "-p", "2222", *LIMITS)),
        ("mpirun", "", {"SLURM_JOB_ID": "7"}, None),
        ("mpirun", "--mca plm_rsh_agent rsh", {}, None),
    ],
)  # fmt: skip
def test_other_hosts_are_reached_as_the_launcher_reaches_them(
    launcher: str, options: str, environment: dict[str, str], ssh: tuple[str, ...] | None
) -> None:
    expected = None if ssh is None else SshRoute(("198.51.100.1", "198.51.100.2"), ssh)
    assert other_hosts.ssh_route(LaunchSpec(launcher, 4, options.split(), THERE), environment) == expected


def test_a_job_of_this_host_needs_no_way() -> None:
    assert other_hosts.ssh_route(LaunchSpec(hosts={"localhost": 2}), {}) is None
    assert other_hosts.ssh_route(LaunchSpec("mpirun"), {}) is None


def test_mpiruns_ssh_arguments_may_be_options() -> None:
    options = ["--mca", "plm_rsh_args", "-p 2222 -o 'ProxyJump a b'"]
    found = other_hosts.ssh_route(LaunchSpec("mpirun", 4, options, THERE), {})
    assert found is not None
    assert found.ssh[2:6] == ("-p", "2222", "-o", "ProxyJump a b")


def test_mpirun_takes_the_environment_along_but_for_what_is_a_hosts_own() -> None:
    own = ("HOSTNAME", "SSH_CLIENT", "SLURM_NODEID", "PWD", "_", "CUDA_VISIBLE_DEVICES", "TMPDIR", "BASH_FUNC_x%%")
    environment = dict.fromkeys([*own, "HVDTRAIN_STALL_S", "OMP_NUM_THREADS", "PYTHONPATH", "MINE", "TERMINAL"], "1")
    exported = other_hosts.exports(LaunchSpec("mpirun", options=["-x", "MINE=2", "--bind-to", "none"]), environment)
    assert exported[::2] == ["-x"] * 5
    assert exported[1::2] == ["HVDTRAIN_RUN_DIR", "HVDTRAIN_STALL_S", "OMP_NUM_THREADS", "PYTHONPATH", "TERMINAL"]
    assert other_hosts.exports(LaunchSpec("mpirun", options=["--mca", "mca_base_env_list", "MINE"]), environment) == []


def test_ranks_fill_one_host_after_the_other() -> None:
    spec = LaunchSpec(ranks=3, hosts=THERE)
    assert other_hosts.by_rank(spec, own="me") == ("me", "198.51.100.1", "198.51.100.1")
    assert other_hosts.by_rank(replace(spec, elastic=True), own="me") == ("", "", "")


@pytest.mark.parametrize(
    ("options", "expected"),
    [("--bind-to none --map-by slot", True), ("--map-by node", False), ("-npernode 2", False), ("", True)],
)
def test_mpirun_may_be_told_to_fill_them_otherwise(options: str, expected: bool) -> None:
    found = other_hosts.by_rank(LaunchSpec("mpirun", 3, options.split(), THERE), own="me")
    assert found == (("me", "198.51.100.1", "198.51.100.1") if expected else ("", "", ""))


def test_a_rank_that_lost_its_peer_leaves_mpirun_time_to_hear_who_was_killed() -> None:
    assert int(other_hosts.settings()["OMPI_MCA_opal_abort_delay"]) >= 1
