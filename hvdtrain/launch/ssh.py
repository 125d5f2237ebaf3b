"""Reach a job's other hosts by ssh: wait for them, end their ranks, request a stop, or ask what a rank held.

Each with a time limit.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.system import network, open_mpi, process_tree

# Waits for a number of seconds, or until a child ends; returns whether to give up.
Wait = Callable[[float], object]

_CONNECT_S = 10
_LIMIT_S = 15.0  # for all hosts together; ssh's own limit is for the connection only
_BETWEEN_S = 2.0
_SSH_FAILED = 255
_NOT_THERE = "does not run"
_OTHER_KEY = "has a changed ssh host key"
_CHANGED = "REMOTE HOST IDENTIFICATION HAS CHANGED"  # a page of text follows
# Waiting does not help.
_PERMANENT = (
    "Permission denied", "Host key verification failed", "bad configuration", "Bad port", "Name or service not known",
    "does not start", _NOT_THERE, _OTHER_KEY,
)  # fmt: skip
# Another way of starting something on other hosts than ssh, which Open MPI takes where it finds one of them.
_SCHEDULERS = (
    "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "OMPI_MCA_plm", "PRTE_MCA_plm", "PRTE_MCA_plm_ssh_agent",
)  # fmt: skip
_OTHER_ROUTES = {"plm", "plm_rsh_agent", "plm_ssh_agent", "launch-agent"}


@dataclass(frozen=True)
class SshRoute:
    """The way to other hosts: the launcher's own ssh command line, without the host."""

    hosts: tuple[str, ...]
    ssh: tuple[str, ...]


def ssh_route(spec: LaunchSpec, environment: Mapping[str, str]) -> SshRoute | None:
    """Return how the launcher reaches other hosts than this one; None where there are none, or it is not by ssh."""
    environment = open_mpi.for_both(environment)
    others = () if spec.elastic else tuple(host for host in spec.hosts if not network.is_here([host]))
    limits = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}")
    if not others or "PRTE_MCA_plm_ssh_agent" in environment:
        return None
    if not spec.is_mpirun:
        port, key = spec.option("-p", "--ssh-port"), spec.option("-i", "--ssh-identity-file")
        options = [*(("-p", port) if port else ()), *(("-i", key) if key else ())]
        return SshRoute(others, ("ssh", *limits, "-o", "StrictHostKeyChecking=accept-new", *options))
    if any(name in environment for name in _SCHEDULERS) or _OTHER_ROUTES & spec.option_names():
        return None
    words = itertools.pairwise(spec.options)
    given = next((text for name, text in words if name in ("plm_rsh_args", "plm_ssh_args")), None)
    given = given or environment.get("PRTE_MCA_plm_ssh_args", "")
    return SshRoute(others, ("ssh", "-x", *shlex.split(given), *limits))


def on_every_host(
    route: SshRoute, task: str, run_dir: Path, *, wait: Wait = time.sleep, limit_s: float = _LIMIT_S
) -> dict[str, str]:
    """Run a task of `process_tree`, "end" or "stop", on all other hosts at once; return {host: why} where it failed."""
    probes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for host in route.hosts:
            line, null, pipe = _line(route, host, task, run_dir), subprocess.DEVNULL, subprocess.PIPE
            probes[host] = subprocess.Popen(line, stdin=null, stdout=null, stderr=pipe, start_new_session=True)
        deadline = time.monotonic() + limit_s
        while any(probe.poll() is None for probe in probes.values()):
            if time.monotonic() > deadline or wait(0.1):
                break
        return {host: _why(host, probe) for host, probe in probes.items() if probe.returncode != 0}
    except OSError as problem:
        return dict.fromkeys(route.hosts, f"{route.ssh[0]} does not start: {problem}")
    finally:
        for probe in probes.values():
            probe.kill()
            probe.wait()
            assert probe.stderr is not None
            probe.stderr.close()


def _line(route: SshRoute, host: str, task: str, run_dir: Path, *words: str) -> list[str]:
    """Return the command line for one host, where this Python and this file have the same paths."""
    there = [sys.executable, "-I", "-S", process_tree.__file__, str(run_dir), task, *words]
    return [*route.ssh, host, shlex.join(there)]


def memory_of(route: SshRoute | None, host: str, run_dir: Path, *, rank: int) -> dict[str, Any]:
    """Return what `process_tree.memory` says of a rank on another host; {} if that host does not say it."""
    if route is None or host not in route.hosts:
        return {}
    try:
        line = _line(route, host, "memory", run_dir, str(rank), tempfile.gettempdir())
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=True)
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def ending(route: SshRoute | None, run_dir: Path) -> list[str]:
    """Return one command that ends a job on every other host; [] if there is none."""
    if route is None:
        return []
    lines = [shlex.join(_line(route, host, "end", run_dir)) for host in route.hosts]
    return ["sh", "-c", " & ".join([*lines, "wait"])]


def _why(host: str, probe: subprocess.Popen[bytes]) -> str:
    if probe.returncode is None:
        return "cannot be reached by ssh: no answer"
    assert probe.stderr is not None
    os.set_blocking(probe.stderr.fileno(), False)  # a program that ssh has started may still have it open
    lines = [line.strip() for line in (probe.stderr.read() or b"").decode(errors="replace").splitlines()]
    said = next((line for line in reversed(lines) if line), f"status {probe.returncode}").removeprefix("ssh: ")
    if any(_CHANGED in line for line in lines):
        forget = next((line for line in lines if line.startswith("ssh-keygen ")), f"ssh-keygen -R {host}")
        return f"{_OTHER_KEY}. If the host was reinstalled, type: {forget}"
    what = "cannot be reached by ssh" if probe.returncode == _SSH_FAILED else f"{_NOT_THERE} {sys.executable}"
    return f"{what}: {said}"


def wait_for_hosts(
    route: SshRoute | None, run_dir: Path, *, limit_s: float, wait: Wait, say: Callable[[str], None]
) -> str:
    """Wait for all hosts, and end what an earlier attempt left there; return why one cannot be reached, else ""."""
    began = time.monotonic()
    reported: dict[str, str] = {}
    while route is not None and (lost := on_every_host(route, "end", run_dir, wait=wait)):
        text = "; ".join(f"host {host} {why}" for host, why in lost.items())
        left_s = limit_s - (time.monotonic() - began)
        if any(word in text for word in _PERMANENT) or left_s <= 0 or wait(0):
            return f"{text}. Try: {' '.join([*route.ssh, next(iter(lost)), sys.executable, '--version'])}"
        if lost.keys() != reported.keys():
            say(f"{text}; trying for {limit_s:.0f} s")
            reported = lost
        until = time.monotonic() + min(_BETWEEN_S, left_s)
        while time.monotonic() < until and not wait(until - time.monotonic()):
            pass
    if reported:
        say(f"{', '.join(reported)} can be reached")
    return ""
