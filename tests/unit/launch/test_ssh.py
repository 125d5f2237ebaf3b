"""A program called as ssh plays it: its hosts are this one, and those in the file `down` do not answer."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hvdtrain.distributed.watchdog import shared_facts
from hvdtrain.launch import ssh
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.launch.ssh import SshRoute
from hvdtrain.system import host_memory, process_tree

SSH = """#!/bin/sh
host=$1
if grep -qs "^$host " down; then
    sed -n "s/^$host /ssh: /p" down >&2
    exit 255
fi
echo "$host" >> reached
exec sh -c "$2"
"""
THERE = {"localhost": 1, "198.51.100.1": 2, "198.51.100.2": 1}
LIMITS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


@pytest.fixture
def route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SshRoute:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "ssh"
    program.write_text(SSH)
    program.chmod(0o755)
    return SshRoute(("a", "b"), (str(program),))


def mark(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], env={**os.environ, process_tree.RUN_DIR: str(folder)})


def test_what_is_left_of_a_job_on_other_hosts_is_ended(route: SshRoute, tmp_path: Path) -> None:
    left, other = mark(tmp_path), mark(tmp_path / "other")
    try:
        assert ssh.on_every_host(route, "end", tmp_path) == {}
        assert left.wait(30) == -9
        assert sorted(Path("reached").read_text().split()) == ["a", "b"]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_one_command_ends_a_job_everywhere(route: SshRoute, tmp_path: Path) -> None:
    left = mark(tmp_path)
    subprocess.run(ssh.ending(route, tmp_path), check=True, timeout=60)
    assert left.wait(30) == -9
    assert sorted(Path("reached").read_text().split()) == ["a", "b"]
    assert ssh.ending(None, tmp_path) == []


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> shared_facts.SharedFacts:
    """The facts of rank 1 on a host that has no folder of the job's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PMIX_NAMESPACE", "19")
    monkeypatch.setenv(process_tree.RUN_DIR, str(tmp_path / "job"))
    return shared_facts.open_facts(1)


@pytest.mark.parametrize("of_the_session", ["the launcher's", "another"])
def test_what_a_rank_held_is_asked_on_its_host(
    route: SshRoute,
    tmp_path: Path,
    facts: shared_facts.SharedFacts,
    monkeypatch: pytest.MonkeyPatch,
    of_the_session: str,
) -> None:
    # horovodrun gives its TMPDIR to ranks everywhere; a session of ssh has the host's own.
    if of_the_session == "another":
        monkeypatch.delenv("TMPDIR")
    job, kills = tmp_path / "job", host_memory.host_oom_kills()
    facts.post("memory", {"text": "weights 5 GB", "job": str(job), "oom_kills": kills - 1})
    found = ssh.memory_of(route, "b", job, rank=1)
    assert (found["text"], found["oom_kills_since"]) == ("weights 5 GB", 1)
    assert Path("reached").read_text().split() == ["b"]
    assert ssh.memory_of(route, "b", tmp_path / "other", rank=1) == {"oom_kills_since": 0}, "another job's"
    assert ssh.memory_of(route, "b", job, rank=0) == {"oom_kills_since": 0}, "another rank's"
    facts.directory.parent.chmod(0o777)
    assert "text" not in ssh.memory_of(route, "b", job, rank=1), "anybody may have written that"


def test_a_host_that_cannot_be_asked_what_a_rank_held_says_nothing(route: SshRoute, tmp_path: Path) -> None:
    Path("down").write_text("b connect to host b port 22: Connection refused\n")
    assert ssh.memory_of(route, "b", tmp_path, rank=1) == {}
    assert ssh.memory_of(route, "c", tmp_path, rank=1) == ssh.memory_of(None, "b", tmp_path, rank=1) == {}


def test_a_host_that_comes_up_in_time_is_waited_for(route: SshRoute, tmp_path: Path) -> None:
    Path("down").write_text("b connect to host b port 22: Connection refused\n")
    said: list[str] = []

    def wait(seconds: float) -> bool:
        if said:
            Path("down").unlink(missing_ok=True)
        time.sleep(min(seconds, 0.05))
        return False

    assert ssh.wait_for_hosts(route, tmp_path, limit_s=100, wait=wait, say=said.append) == ""
    assert said == [
        "host b cannot be reached by ssh: connect to host b port 22: Connection refused; trying for 100 s",
        "b can be reached",
    ]


@pytest.mark.parametrize(
    ("down", "limit_s", "expected"),
    [
        ("b connect: Connection refused", 0, "host b cannot be reached by ssh: connect: Connection refused. Try: "),
        ("a me@a: Permission denied (publickey).", 1e9, "host a cannot be reached by ssh: me@a: Permission denied"),
    ],
)
def test_the_wait_has_an_end_and_none_is_made_where_it_does_not_help(
    route: SshRoute, tmp_path: Path, down: str, limit_s: float, expected: str
) -> None:
    Path("down").write_text(f"{down}\n")
    problem = ssh.wait_for_hosts(route, tmp_path, limit_s=limit_s, wait=time.sleep, say=print)
    assert problem.startswith(expected)


@pytest.mark.parametrize("forget", ["", 'ssh-keygen -f "known_hosts" -R "[a]:2222"'])
def test_a_host_with_another_key_is_told_in_one_line(forget: str, tmp_path: Path) -> None:
    page = (
        f"@@@\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n@@@\n  {forget}\nHost key verification failed.\n"
    )
    (tmp_path / "page").write_text(page)
    changed = SshRoute(("a",), ("sh", "-c", f"cat {tmp_path / 'page'} >&2; exit 255"))
    problem = ssh.wait_for_hosts(changed, tmp_path, limit_s=1e9, wait=time.sleep, say=print)
    said = f"host a has a changed ssh host key. If the host was reinstalled, type: {forget or 'ssh-keygen -R a'}"
    assert problem.startswith(f"{said}. Try: ")


def test_a_host_without_this_python_is_named_at_once(
    route: SshRoute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/gone/python")
    problem = ssh.wait_for_hosts(route, tmp_path, limit_s=1e9, wait=time.sleep, say=print)
    assert "host a does not run /gone/python: " in problem
    assert "not found" in problem


def test_a_host_that_says_nothing_has_a_limit(tmp_path: Path) -> None:
    silent = SshRoute(("a",), ("sh", "-c", "sleep 60"))
    assert ssh.on_every_host(silent, "end", tmp_path, limit_s=0.2) == {"a": "cannot be reached by ssh: no answer"}


def test_without_ssh_there_is_a_word_for_it(tmp_path: Path) -> None:
    nothing = SshRoute(("a",), (str(tmp_path / "ssh"),))
    problem = ssh.wait_for_hosts(nothing, tmp_path, limit_s=1e9, wait=time.sleep, say=print)
    assert "does not start" in problem


@pytest.mark.parametrize(
    ("launcher", "options", "environment", "expected"),
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
    launcher: str, options: str, environment: dict[str, str], expected: tuple[str, ...] | None
) -> None:
    route = None if expected is None else SshRoute(("198.51.100.1", "198.51.100.2"), expected)
    assert ssh.ssh_route(LaunchSpec(launcher, 4, options.split(), THERE), environment) == route


def test_a_job_of_this_host_needs_no_way() -> None:
    assert ssh.ssh_route(LaunchSpec(hosts={"localhost": 2}), {}) is None
    assert ssh.ssh_route(LaunchSpec("mpirun"), {}) is None


def test_mpiruns_ssh_arguments_may_be_options() -> None:
    options = ["--mca", "plm_rsh_args", "-p 2222 -o 'ProxyJump a b'"]
    found = ssh.ssh_route(LaunchSpec("mpirun", 4, options, THERE), {})
    assert found is not None
    assert found.ssh[2:6] == ("-p", "2222", "-o", "ProxyJump a b")
