"""Find the processes of one job on this host, and end them.

As a script it takes the job's folder and a task:

    guard COMMAND   when standard input ends without DONE, end the job, remove its folder, and run the command
    end             end the job; `hvdtrain run` on another host runs this by ssh
    stop            request a stop of its ranks; likewise
    memory RANK     print what a rank of the job wrote last about its memory, as JSON; likewise

Every process of a job has the job's folder in its environment, also if its parent has ended. This file imports nothing
of hvdtrain, because the guard is a bare interpreter that lives as long as the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

RUN_DIR = "HVDTRAIN_RUN_DIR"
DONE = b"done"

_RANK_VARIABLES = (b"HOROVOD_RANK", b"OMPI_COMM_WORLD_RANK", b"PMI_RANK")
_PAUSE_S = 0.02
_QUIET_SCANS = 3


class Process(NamedTuple):
    """One process of a job; `rank` is None for the launcher's processes."""

    pid: int
    parent: int
    rank: int | None


def members(run_dir: str | None, *, below: int | None = None, without: tuple[int, ...] = ()) -> dict[int, Process]:
    """Return the living processes of the job of `run_dir`, by pid.

    `run_dir` is None for a job without a folder. The process `below` and its descendants belong to the job too, since a
    program may overwrite its environment. The calling process does not, nor do `without` and their descendants.
    """
    mark = f"{RUN_DIR}={run_dir}".encode()
    parents: dict[int, int] = {}
    environments: dict[int, list[bytes]] = {}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            # A process's name, which stands before, may hold any character.
            state, parent, *_ = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            if state != "Z":
                parents[pid] = int(parent)
                environments[pid] = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    left_out = {os.getpid(), *without}
    job = {below, *({pid for pid, variables in environments.items() if run_dir and mark in variables} - left_out)}
    while more := {pid for pid, parent in parents.items() if parent in job} - job - left_out:
        job |= more
    return {
        pid: Process(pid, parents[pid], _rank(environments.get(pid, []))) for pid in parents.keys() & job - left_out
    }


def _rank(variables: list[bytes]) -> int | None:
    given = dict(variable.split(b"=", 1) for variable in variables if b"=" in variable)
    return next((int(given[name]) for name in _RANK_VARIABLES if given.get(name, b"").isdigit()), None)


def request_stop(job: dict[int, Process], *, requested: set[int], pids: dict[int, int]) -> None:
    """Request a stop of every rank of `job`, once: by SIGUSR1 if it handles it, else by SIGTERM.

    `requested` are pids that have received a request; new ones are added. `pids` are the ranks' as far as reported.
    """
    tops = {p.pid for p in job.values() if p.rank is not None and (p.parent not in job or job[p.parent].rank != p.rank)}
    tops |= {pid for pid in pids.values() if pid in job and not _is_below(job, pid, tops)}
    for top in tops:
        level = [top]
        while level and not (found := [(pid, number) for pid in level if (number := _signal_of(pid)) is not None]):
            level = [process.pid for process in job.values() if process.parent in level]
        for pid, number in found or [(top, signal.SIGTERM)]:
            if pid not in requested:
                requested.add(pid)
                send(pid, number)


def _signal_of(pid: int) -> int | None:
    return next((number for number in (signal.SIGUSR1, signal.SIGTERM) if handles(pid, number)), None)


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for signal `number`."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return any(int(line.split()[1], 16) >> (number - 1) & 1 for line in lines if line.startswith("SigCgt:"))
    return False


def _is_below(job: dict[int, Process], pid: int, tops: set[int]) -> bool:
    while pid in job and pid not in tops:
        pid = job[pid].parent
    return pid in job


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def end(run_dir: str | None, *, below: int | None = None, without: tuple[int, ...] = (), limit_s: float = 10.0) -> bool:
    """Kill all processes of a job (see `members`); return whether none is left."""
    deadline = time.monotonic() + limit_s
    stopped: set[int] = set()
    # Stop all before killing any: a child whose parent is gone may not be found any more.
    while (new := members(run_dir, below=below, without=without).keys() - stopped) and time.monotonic() < deadline:
        for pid in new:
            send(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        send(pid, signal.SIGKILL)
    quiet = 0
    # Also kill what one of them started before it was stopped.
    while quiet < _QUIET_SCANS:
        found = members(run_dir, below=below, without=without)
        for pid in found:
            send(pid, signal.SIGKILL)
        quiet = 0 if found else quiet + 1
        if found and time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


def guard(run_dir: str, elsewhere: list[str]) -> None:
    """Wait until standard input ends; without DONE, end the job, remove its folder, run `elsewhere` for other hosts."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(each, signal.SIG_IGN)
    if sys.stdin.buffer.read() != DONE:
        end(run_dir)
        shutil.rmtree(run_dir, ignore_errors=True)
        if elsewhere:
            subprocess.run(elsewhere, stdin=subprocess.DEVNULL)


def memory(run_dir: str, rank: str, launchers_folder: str) -> dict[str, Any]:
    """Return what a rank of this host wrote last about its memory, and how many processes the OOM killer ended since.

    The rank wrote it into a private folder of its user (see `distributed.watchdog.shared_facts`), which is in the
    host's own temporary folder, or in the launcher's: some launchers give their TMPDIR to ranks on other hosts.
    """
    import tempfile  # not at the top: the guard lives long, and does not need it

    bases = {Path(folder, f"hvdtrain-{os.getuid()}") for folder in (tempfile.gettempdir(), launchers_folder)}
    # Another user may have made a folder of this name.
    private = [base for base in bases if base.is_dir() and _is_private(base.stat())]
    found: dict[str, Any] = {}
    for path in sorted((path for base in private for path in base.glob(f"*/memory-{rank}.json")), key=os.path.getmtime):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if (content := json.loads(path.read_text())).get("job") == run_dir:
                found = content
    lines = [line.split() for line in Path("/proc/vmstat").read_text().splitlines()]
    kills = next((int(words[1]) for words in lines if words[0] == "oom_kill"), 0)
    return found | {"oom_kills_since": kills - int(found.get("oom_kills", kills))}


def _is_private(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not found.st_mode & 0o077


if __name__ == "__main__":
    folder, task, *command = sys.argv[1:]
    if task == "guard":
        guard(folder, command)
    elif task == "end":
        end(folder)
    elif task == "memory":
        sys.stdout.write(json.dumps(memory(folder, *command)))
    else:
        request_stop(members(folder), requested=set(), pids={})
