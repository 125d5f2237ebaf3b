"""One attempt of a job: its launcher, and a guard that outlives this process."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hvdtrain.launch.exit_cause import Listener
from hvdtrain.launch.other_hosts import SshRoute
from hvdtrain.launch.rank_output import MarkedLines, without_mark
from hvdtrain.launch.spec import LaunchSpec
from hvdtrain.system import log_filter, open_mpi, process_tree

_PR_SET_CHILD_SUBREAPER = 36
_DRAIN_S = 2.0
_HALF_LINE_S = 1.0


@dataclass(frozen=True)
class Launch:
    """A command to run, and how to run it.

    Attributes:
        spec: the parsed launch command.
        line: the launcher's command line.
        environment: of the launcher and its ranks.
        max_restarts: how often it is restarted.
        grace_s: time for an orderly stop.
        ssh: the route to other hosts, if it is ssh.
        by_rank: the host of each rank, "" where it is not known; empty for this one.
    """

    spec: LaunchSpec
    line: Sequence[str]
    environment: Mapping[str, str]
    max_restarts: int = 0
    grace_s: float = 0.0
    ssh: SshRoute | None = None
    by_rank: Sequence[str] = ()


class Guard:
    """A helper process that ends the job if this process is killed; see `process_tree.guard`."""

    def __init__(self, run_dir: Path, elsewhere: Sequence[str] = ()) -> None:
        self._run_dir = run_dir
        self._elsewhere = elsewhere
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ensure(self) -> None:
        """Start it again if it has ended."""
        if self._process.poll() is not None:
            self._close()
            self._process = self._start()

    def dismiss(self) -> None:
        """End it: nothing is left to guard."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(process_tree.DONE)
        except OSError:
            pass
        self._close()
        self._process.wait()

    def _close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", process_tree.__file__, str(self._run_dir), "guard", *self._elsewhere],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is not for it
            cwd="/",
        )


def adopt_orphans() -> None:
    """Become the parent of every orphan below this process: a rank whose launcher was killed is still found."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Job:
    """A launcher in its own session, with its process tree."""

    def __init__(self, launch: Launch, run_dir: Path, guard: Guard) -> None:
        self.run_dir = run_dir
        self.listener = Listener(socket.gethostname(), launch.by_rank)
        self._began = time.monotonic()
        self._guard = guard
        self._requested: set[int] = set()  # pids
        self._is_elsewhere = launch.spec.is_elsewhere
        # A scheduler sends SIGTERM to every process of a job. mpirun would then kill its ranks while they write a
        # checkpoint; with the signal blocked, it waits for them. It unblocks all signals for its ranks.
        self._is_deaf = launch.spec.is_mpirun
        # Called now, because after the job all descendants of this process are killed, also a running mpirun --version.
        open_mpi.spaces_marks()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if self._is_deaf else set())
        try:
            self._process = subprocess.Popen(
                launch.line,
                env={**launch.environment, process_tree.RUN_DIR: str(run_dir)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._copies = [
            threading.Thread(target=self._copy, args=(name, source, number), daemon=True)
            for name, source, number in (("stdout", self._process.stdout, 1), ("stderr", self._process.stderr, 2))
        ]
        for copy in self._copies:
            copy.start()

    def status(self) -> int | None:
        """Return the launcher's exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def seconds(self) -> float:
        """Return how long ago it was started."""
        return time.monotonic() - self._began

    def members(self) -> dict[int, process_tree.Process]:
        """Return its processes on this host."""
        return process_tree.members(str(self.run_dir), below=os.getpid(), without=(self._guard.pid,))

    def request_stop(self, pids: dict[int, int]) -> bool:
        """Request a stop of its ranks, once each; return False if there is none."""
        job = self.members()
        process_tree.request_stop(job, requested=self._requested, pids=pids)
        if self._is_elsewhere:
            if self._is_deaf and self._process.pid not in self._requested:
                self._requested.add(self._process.pid)
                process_tree.send(self._process.pid, signal.SIGUSR1)  # mpirun passes it on
            return self.status() is None
        return any(process.rank is not None for process in job.values())

    def send(self, number: int) -> None:
        """Send a signal to every process of it."""
        for pid in self.members():
            process_tree.send(pid, number)
        if number == signal.SIGTERM and self._is_deaf:
            process_tree.send(self._process.pid, signal.SIGINT)  # not blocked: it ends its ranks elsewhere

    def end(self) -> bool:
        """Kill the remaining processes; return whether all have ended."""
        gone = process_tree.end(str(self.run_dir), below=os.getpid(), without=(self._guard.pid,))
        self._process.kill()
        self._process.wait()
        for copy in self._copies:
            copy.join(_DRAIN_S)
        self._reap()
        return gone

    def _reap(self) -> None:
        """Wait for adopted processes that have ended."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid == self._guard.pid:  # its Popen waits for the guard
                return
            os.waitpid(found.si_pid, os.WNOHANG)

    def _copy(self, name: str, source: IO[bytes] | None, number: int) -> None:
        """Copy what comes through a pipe to our own stream, as it comes, but in whole lines."""
        assert source is not None
        out, lines = _Stream(number), MarkedLines()
        with source:
            while True:
                begun = lines.begun()
                wait_s = None if begun is None else max(0.0, begun + _HALF_LINE_S - time.monotonic())
                if not select.select([source], [], [], wait_s)[0]:
                    out.write(lines.late(now=time.monotonic(), limit_s=_HALF_LINE_S))
                    continue
                data = os.read(source.fileno(), 2**16)
                if not data:
                    break
                self.listener.hear(name, data)
                out.write(lines.feed(data, now=time.monotonic()))
        out.write(lines.end())


class _Stream:
    """Standard output or error of this process, written as long as it has a reader."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._there = True
        self._quiet = log_filter.wanted()

    def write(self, lines: list[bytes]) -> None:
        """Write lines, without frameworks' start-up notes."""
        if self._quiet:
            lines = [line for line in lines if not log_filter.is_note(without_mark(line))]
        view = memoryview(b"".join(line + b"\n" for line in lines))
        while self._there and view:
            try:
                view = view[os.write(self._number, view) :]
            except OSError:  # no reader is left: the job continues
                self._there = False
