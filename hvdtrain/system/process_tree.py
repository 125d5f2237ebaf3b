"""Find the processes of one job on this host, and end them.

As a script it takes the job's folder and what to do:

    guard COMMAND   end the job and remove its folder should standard input end without a word; then run the command
    end             end the job, as another host's `hvdtrain run` asks by ssh
    ask             ask its ranks to stop, likewise

Every process of a job carries its run folder in its environment, whoever started it and whoever its parent is now.
This file imports nothing of hvdtrain: as a guard it runs in a bare interpreter, for as long as the job.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

RUN_DIR = "HVDTRAIN_RUN_DIR"
DONE = b"done"

_RANK_VARIABLES = (b"HOROVOD_RANK=", b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=")
_PAUSE_S = 0.02
_QUIET_SCANS = 3


@dataclass(frozen=True)
class Process:
    """One process of a job; `rank` is None for the launcher's own."""

    pid: int
    parent: int
    rank: int | None


def members(run_dir: str | None, *, below: int | None = None, without: tuple[int, ...] = ()) -> dict[int, Process]:
    """Return the living processes of the job of `run_dir`, by pid.

    Args:
        run_dir: what the job's processes carry as HVDTRAIN_RUN_DIR; None for a job that has no folder.
        below: a process that belongs to the job with its descendants, unless it is the calling one: a program may
            write over its environment.
        without: processes that do not belong to it, nor what they started.
    """
    mark = f"{RUN_DIR}={run_dir}".encode()
    parents: dict[int, int] = {}
    environments: dict[int, list[bytes]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            state, parent = _state(pid)
            if state == "Z":
                continue
            parents[pid] = parent
            environments[pid] = Path(entry.path, "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
    left_out = {os.getpid(), *without}
    job = {pid for pid, variables in environments.items() if pid == below or (run_dir and mark in variables)} - left_out
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in job or (below is not None and parent == below)}
        more -= job | left_out
        job |= more
        grown = bool(more)
    return {pid: Process(pid, parents[pid], _rank(environments.get(pid, []))) for pid in job}


def _state(pid: int) -> tuple[str, int]:
    """Return (state, parent) of a process. Its name, which stands before, may hold any character."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[1])


def _rank(variables: list[bytes]) -> int | None:
    for name in _RANK_VARIABLES:
        for variable in variables:
            if variable.startswith(name) and variable[len(name) :].isdigit():
                return int(variable[len(name) :])
    return None


def hears(pid: int, number: int) -> bool:
    """Return whether a process has a handler for signal `number`."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError):
        pass
    return False


def ask_to_stop(job: dict[int, Process], *, asked: set[int], pids: dict[int, int]) -> None:
    """Ask every rank of `job` to stop, each once: by SIGUSR1 where it handles that, else by SIGTERM.

    Of a rank's processes the outermost that handles one is asked: a shell around it would only die.

    Args:
        job: what `members` returned.
        asked: pids that were asked before; new ones are added.
        pids: rank -> the process that is the rank, as far as ranks have reported it.
    """
    tops = {p.pid for p in job.values() if p.rank is not None and (p.parent not in job or job[p.parent].rank != p.rank)}
    tops |= {pid for pid in pids.values() if pid in job and not _is_below(job, pid, tops)}
    for top in tops:
        level = [top]
        while level and not (found := [(pid, number) for pid in level if (number := _request(pid)) is not None]):
            level = [process.pid for process in job.values() if process.parent in level]
        for pid, number in found or [(top, signal.SIGTERM)]:
            if pid not in asked:
                asked.add(pid)
                send(pid, number)


def _request(pid: int) -> int | None:
    return next((number for number in (signal.SIGUSR1, signal.SIGTERM) if hears(pid, number)), None)


def _is_below(job: dict[int, Process], pid: int, tops: set[int]) -> bool:
    while pid in job and pid not in tops:
        pid = job[pid].parent
    return pid in job


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def end(run_dir: str | None, *, below: int | None = None, without: tuple[int, ...] = (), limit_s: float = 10.0) -> bool:
    """Kill a job (see `members`) until nothing of it is left; return whether nothing is."""
    deadline = time.monotonic() + limit_s
    stopped: set[int] = set()
    # Stop all before killing any: a child whose parent is gone may have nothing to be found by.
    while (new := members(run_dir, below=below, without=without).keys() - stopped) and time.monotonic() < deadline:
        for pid in new:
            send(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        send(pid, signal.SIGKILL)
    quiet = 0
    # Also what one of them has started before it was stopped.
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
    """Wait for the end of standard input; unless DONE precedes it, end the job and remove its folder.

    `elsewhere` is a command that ends the job on other hosts; may be empty.
    """
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(each, signal.SIG_IGN)
    if sys.stdin.buffer.read() != DONE:
        end(run_dir)
        shutil.rmtree(run_dir, ignore_errors=True)
        if elsewhere:
            subprocess.run(elsewhere, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    folder, task, *command = sys.argv[1:]
    if task == "guard":
        guard(folder, command)
    elif task == "end":
        end(folder)
    else:
        ask_to_stop(members(folder), asked=set(), pids={})
