"""One attempt of a job: its launcher, and a guard that outlives this process."""

from __future__ import annotations

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

from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.launch.exit_cause import Listener
from hvdtrain.launch.rank_output import MarkedLines, split_mark
from hvdtrain.launch.shortened import Shortened
from hvdtrain.launch.ssh import SshRoute
from hvdtrain.system import host_memory, log_filter, open_mpi, process_tree
from hvdtrain.system.settings import DEBUG

_DRAIN_S = 2.0
_HALF_LINE_S = 1.0


@dataclass(frozen=True)
class Launch:
    """A command to run, and how to run it."""

    spec: LaunchSpec  # the parsed launch command
    line: Sequence[str]  # the launcher's command line
    environment: Mapping[str, str]  # of the launcher and its ranks
    max_restarts: int = 0
    grace_s: float = 0.0  # time for an orderly stop
    ssh: SshRoute | None = None  # the route to other hosts, if it is ssh
    by_rank: Sequence[str] = ()  # the host of each rank, "" where it is not known; empty for this one


class Guard:
    """A helper process that ends the job if this process is killed; see `process_tree.guard`."""

    def __init__(self, run_dir: Path, elsewhere: Sequence[str] = ()) -> None:
        self._line = [sys.executable, "-I", "-S", process_tree.__file__, str(run_dir), "guard", *elsewhere]
        self._job = str(run_dir)
        self._process = self._start()

    def ensure(self) -> None:
        """Start it again if it has ended."""
        if self._process.poll() is not None:
            self._process.communicate()
            self._process = self._start()

    def dismiss(self) -> None:
        """End it: nothing is left to guard."""
        self._process.communicate(process_tree.DONE)

    def members(self) -> dict[int, process_tree.Process]:
        """Return the job's processes on this host."""
        return process_tree.members(self._job, below=os.getpid(), without=(self._process.pid,))

    def end(self) -> bool:
        """Kill the job's processes on this host; return whether none is left."""
        return process_tree.end(self._job, below=os.getpid(), without=(self._process.pid,))

    def reap(self) -> None:
        """Wait for adopted processes that have ended."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid == self._process.pid:  # its Popen waits for the guard
                return
            os.waitpid(found.si_pid, os.WNOHANG)

    def _start(self) -> subprocess.Popen[bytes]:
        null = subprocess.DEVNULL
        return subprocess.Popen(
            self._line, stdin=subprocess.PIPE, stdout=null, stderr=null, cwd="/",
            start_new_session=True,  # a Ctrl-C is not for it
        )  # fmt: skip


class Job:
    """A launcher in its own session, with its process tree."""

    def __init__(self, launch: Launch, run_dir: Path, guard: Guard) -> None:
        self.run_dir = run_dir
        self.listener = Listener(socket.gethostname(), launch.by_rank)
        self.began = time.monotonic()
        self.oom_kills = host_memory.oom_kills()  # before it
        self._guard = guard
        self._requested: set[int] = set()  # pids
        self._is_elsewhere = launch.spec.is_elsewhere
        # A scheduler sends SIGTERM to every process of a job. mpirun would then kill its ranks while they write a
        # checkpoint; with the signal blocked, it waits for them. It unblocks all signals for its ranks.
        self._ignores_sigterm = launch.spec.is_mpirun
        # Called now, because after the job all descendants of this process are killed, also a running mpirun --version.
        open_mpi.spaces_marks()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if self._ignores_sigterm else set())
        try:
            environment, pipe = {**launch.environment, process_tree.RUN_DIR: str(run_dir)}, subprocess.PIPE
            self._process = subprocess.Popen(
                launch.line, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._copies: list[threading.Thread] = []
        for name, source, number in (("stdout", self._process.stdout, 1), ("stderr", self._process.stderr, 2)):
            self._copies.append(threading.Thread(target=self._copy, args=(name, source, number), daemon=True))
            self._copies[-1].start()

    def status(self) -> int | None:
        """Return the launcher's exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def request_stop(self, pids: dict[int, int]) -> bool:
        """Request a stop of its ranks, once each; return False if there is none."""
        job = self._guard.members()
        process_tree.request_stop(job, requested=self._requested, pids=pids)
        if self._is_elsewhere:
            if self._ignores_sigterm and self._process.pid not in self._requested:
                self._requested.add(self._process.pid)
                process_tree.send(self._process.pid, signal.SIGUSR1)  # mpirun passes it on
            return self.status() is None
        return any(process.rank is not None for process in job.values())

    def send(self, number: int) -> None:
        """Send a signal to every process of it."""
        for pid in self._guard.members():
            process_tree.send(pid, number)
        if number == signal.SIGTERM and self._ignores_sigterm:
            process_tree.send(self._process.pid, signal.SIGINT)  # not blocked: it ends its ranks elsewhere

    def end(self) -> bool:
        """Kill the remaining processes; return whether all have ended."""
        gone = self._guard.end()
        self._process.kill()
        self._process.wait()
        for copy in self._copies:
            copy.join(_DRAIN_S)
        self._guard.reap()
        return gone

    def _copy(self, name: str, source: IO[bytes] | None, number: int) -> None:
        """Copy a pipe to our own stream at once, but in whole lines."""
        assert source is not None
        lines, shortened, is_read = MarkedLines(), Shortened(), True
        is_quiet, is_short = log_filter.wanted(), os.environ.get(DEBUG) != "1"

        def shown(found: list[bytes]) -> list[bytes]:
            if is_quiet:
                found = [each for each in found if not log_filter.is_note(split_mark(each)[1].decode(errors="replace"))]
            return shortened.feed(map(split_mark, found)) if is_short else found

        def write(shown: list[bytes]) -> None:
            nonlocal is_read
            view = memoryview(b"".join(line + b"\n" for line in shown))
            while is_read and view:
                try:
                    view = view[os.write(number, view) :]
                except OSError:  # no reader is left: the job continues
                    is_read = False

        with source:
            while True:
                begun = lines.begun()
                wait_s = None if begun is None else max(0.0, begun + _HALF_LINE_S - time.monotonic())
                if not select.select([source], [], [], wait_s)[0]:
                    write(shown(lines.late(now=time.monotonic(), limit_s=_HALF_LINE_S)))
                    continue
                data = os.read(source.fileno(), 2**16)
                if not data:
                    break
                self.listener.feed(name, data)
                write(shown(lines.feed(data, now=time.monotonic())))
        write([*shown(lines.end()), *shortened.end()])
