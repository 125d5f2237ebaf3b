"""The interfaces at which Open MPI may listen on several hosts, and the message where it is free to choose."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from hvdtrain.horovod_build.shared import listen_on, loopback

HERE = ["localhost", "192.0.2.77"]
LIBRARY = "/opt/horovod/libhvdtrain_listen.so"


@pytest.fixture(autouse=True)
def preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "preload", lambda library, before: ":".join(filter(None, [library, before])))
    for name in listen_on._SCHEDULERS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("nics", "options", "environment", "expected"),
    [
        ((), "", {}, ()),
        (("eth1", "eth0"), "", {}, ("eth0", "eth1")),
        ((), "--mca btl_tcp_if_include eth1,eth2 --mca pml ob1", {}, ("eth1", "eth2")),
        ((), "", {"OMPI_MCA_btl_tcp_if_include": "10.1.0.0/16"}, ("10.1.0.0/16",)),
        # Daemons with a network of their own, and ranks on all.
        ((), "--mca oob_tcp_if_include eth0", {"PRTE_MCA_prte_if_include": "eth0"}, ()),
        (("ib0",), "--mca oob_tcp_if_include eth0", {"PRTE_MCA_prte_if_include": "eth1"}, ("eth0", "eth1", "ib0")),
    ],
)
def test_the_interfaces_are_those_of_ranks_and_of_daemons(
    nics: tuple[str, ...], options: str, environment: dict[str, str], expected: tuple[str, ...]
) -> None:
    assert listen_on.interfaces(nics, options, environment) == expected


def test_open_mpis_own_files_give_daemons_a_network_too(tmp_path: Path) -> None:
    said = "mca:oob:tcp:param:oob_tcp_if_include:value:eth7,eth8"
    (tmp_path / "ompi_info").write_text(f"#!/bin/sh\necho {said}\necho {said.replace('include', 'exclude')}\n")
    (tmp_path / "ompi_info").chmod(0o755)
    environment = {"PATH": str(tmp_path)}
    assert listen_on.interfaces(("eth0",), "", environment) == ("eth0", "eth7", "eth8")
    assert listen_on.interfaces((), "", environment) == ()


@pytest.mark.parametrize("chosen", ["lo", "127.0.0.0/8"])
def test_mpirun_and_its_daemons_get_the_library(chosen: str) -> None:
    found = listen_on.variables(LIBRARY, [chosen], HERE, "", {"LD_PRELOAD": "mine.so"})
    assert found["LD_PRELOAD"] == f"{LIBRARY}:mine.so"
    assert found["HVDTRAIN_LISTEN_ON"] == chosen
    assert found["OMPI_MCA_orte_launch_agent"].endswith(" orted")
    assert found["PRTE_MCA_prte_launch_agent"].endswith(" prted")


def test_a_scheduler_takes_the_environment_along_and_has_no_shell() -> None:
    assert set(listen_on.variables(LIBRARY, ["lo"], HERE, "", {"SLURM_JOB_ID": "1"})) == {
        "LD_PRELOAD",
        "HVDTRAIN_LISTEN_ON",
    }


@pytest.mark.parametrize(
    ("chosen", "hosts", "options", "library", "why"),
    [
        ("nosuch0", HERE, "", LIBRARY, "this host has no address on nosuch0"),
        ("10.0.0.0/33", HERE, "", LIBRARY, "this host has no address on"),
        ("lo;x", HERE, "", LIBRARY, "is no list of interfaces"),
        ("lo", ["192.0.2.77"], "", LIBRARY, "this host, which is none of them, does not reach them by lo"),
        ("lo", HERE, "--launch-agent mine", LIBRARY, "a launch agent of yours"),
        ("lo", HERE, "", "/my own/lib.so", "'/my own/lib.so'"),
    ],
)
def test_a_job_that_cannot_be_kept_runs_and_one_line_says_why(
    chosen: str, hosts: list[str], options: str, library: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert listen_on.variables(library, [chosen], hosts, options, {}) == {}
    (line,) = capsys.readouterr().err.splitlines()
    assert "Open MPI listens on every network interface of this job's hosts" in line
    assert why in line


def test_nothing_is_said_where_nothing_was_chosen_or_all_was_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert listen_on.variables(LIBRARY, [], HERE, "", {}) == {}
    assert listen_on.variables(LIBRARY, ["lo"], HERE, "", {"HVDTRAIN_LOOPBACK": "0"}) == {}
    assert capsys.readouterr().err == ""


def test_a_host_from_which_all_others_are_reached_by_the_interface_need_not_be_one_of_them() -> None:
    name, address = next(
        (name, each.address)
        for name, found in psutil.net_if_addrs().items()
        for each in found
        if each.address.startswith("127.")
    )
    assert listen_on._why_not([name], [address]) == ""


@pytest.mark.parametrize("is_there", [True, False])
def test_a_daemon_is_started_with_the_library_or_with_a_line_that_names_its_host(
    is_there: bool, tmp_path: Path
) -> None:
    library = tmp_path / "listen.so"
    source = tmp_path / "empty.c"
    source.write_text("")
    if is_there:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    agent = listen_on._agent(str(library), "eth0,10.1.0.0/16", "env")
    # What Open MPI does with it: split at each space, joined again, maybe between double quotes.
    assert not set(agent) & set('"$`\\')
    assert "  " not in agent
    done = subprocess.run(["/bin/sh", "-c", agent], capture_output=True, text=True, check=True)
    host = subprocess.run(["uname", "-n"], capture_output=True, text=True, check=True).stdout.strip()
    if is_there:
        assert f"LD_PRELOAD={library}\n" in done.stdout
        assert "HVDTRAIN_LISTEN_ON=eth0,10.1.0.0/16\n" in done.stdout
        assert done.stderr == ""
    else:
        assert "LD_PRELOAD" not in done.stdout
        assert (
            done.stderr
            == f"hvdtrain: Open MPI listens on every network interface of a host without {library}: {host}\n"
        )
