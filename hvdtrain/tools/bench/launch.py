"""Start ranks under horovodrun, wait for them up to a limit, and return what each printed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from hvdtrain.errors import HvdTrainError
from hvdtrain.launch import arguments, ssh
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.launch.exit_cause import traceback_in
from hvdtrain.launch.rank_output import Line, OutputLines
from hvdtrain.system import process_tree
from hvdtrain.system.start_ranks import horovodrun, rank_environment

_EXIT_GRACE_S = 20.0
_POLL_S = 0.05
_TAIL_LINES = 15


class BenchError(HvdTrainError):
    """`hvdtrain bench` has failed; one line says why."""


def parse_hosts(text: str | None, *, ranks: int, cores: int) -> LaunchSpec:
    """Return where `ranks` ranks run, by a list as for horovodrun -H; UsageError if slots or cores are too few."""
    arguments.whole_number("-np", str(ranks), least=1)
    hosts = {} if text is None else arguments.hosts(["-H", text])
    arguments.check_ranks(ranks, slots=hosts, elastic=False, cores=cores)
    return LaunchSpec(ranks=ranks, hosts=hosts)


@dataclass(frozen=True)
class LaunchOutcome:
    """The end of a launch."""

    status: int | None  # horovodrun's exit status; None where it had to be ended
    lines: list[Line]  # what each rank printed, and the launcher, whose rank is None

    def marked(self, mark: str) -> dict[int, str]:
        """Return rank -> the rest of the rank's last line that begins with `mark`."""
        return {
            rank: text.removeprefix(mark) for rank, text in self.lines if rank is not None and text.startswith(mark)
        }

    def reports(self, mark: str, read: Callable[[str], Any]) -> list[Any]:
        """Return what `read` makes of each rank's line that begins with `mark`."""
        found = []
        for text in self.marked(mark).values():
            try:
                found.append(read(text))
            except (ValueError, KeyError, TypeError) as problem:
                raise BenchError(f"a rank's report cannot be read ({problem}): {text[:200]}") from None
        return found

    def last_words(self) -> str:
        """Return the rank and line of the first error found, and the end of what that rank printed."""
        printed: dict[int | None, list[str]] = {None: []}
        for number, text in self.lines:
            if text.strip() and not text.startswith("HVDTRAIN_"):  # our own reports
                printed.setdefault(number, []).append(text.rstrip())
        failed = [number for number, lines in printed.items() if traceback_in(lines)]
        rank = min(failed, key=lambda number: math.inf if number is None else number, default=None)
        said = "\n".join(f"  {line}" for line in printed[rank][-_TAIL_LINES:]) or "  (nothing)"
        _, _, found = traceback_in(printed[rank]).rpartition("\n")  # "" for a traceback of one line, which was cut off
        error = "" if found.startswith((" ", "\t", "Traceback ")) else found
        who = "the launcher" if rank is None else f"rank {rank}"
        first = f"{who} raised {error.rstrip('.')}" if error else f"the last words are those of {who}"
        return f"{first}. The end of what it printed:\n{said}"


def run_ranks(
    spec: LaunchSpec,
    program: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout_s: float,
    mark: str,
    answers: int,
) -> LaunchOutcome:
    """Run `python PROGRAM...` on every rank; once `answers` lines begin with `mark`, the ranks get 20 s to end."""
    line = [*_horovodrun(spec), sys.executable, *program]
    given = rank_environment({"PYTHONUNBUFFERED": "1", **environment})
    route = ssh.ssh_route(spec, given)
    lost = {} if route is None else ssh.on_every_host(route, "end", Path(tempfile.gettempdir(), "hvdtrain-bench"))
    if lost:
        raise BenchError("; ".join(f"host {host} {why}" for host, why in lost.items()))
    deadline = time.monotonic() + timeout_s
    # To a file, not a pipe: a grandchild that survives its parent would keep a pipe open.
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(line, env=given, stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True)
        except OSError as problem:
            raise BenchError(f"{line[0]} does not start: {problem}") from None
        # In a session of their own, ranks would outlive a command that is ended from outside.
        ending = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
        for each in ending:
            signal.signal(each, lambda number, frame: sys.exit(128 + number))
        try:
            status = _wait(process, log.fileno(), answers, mark, deadline)
        finally:
            if process.poll() is None:
                process_tree.end(None, below=process.pid)
                process.wait()
            for each in ending:
                signal.signal(each, signal.SIG_DFL)
        log.seek(0)
        return LaunchOutcome(status, OutputLines().all(log.read()))


def _horovodrun(spec: LaunchSpec) -> list[str]:
    hosts = arguments.listed(spec.hosts or {"localhost": spec.ranks})
    return [*horovodrun(Path(sys.executable)), "-np", str(spec.ranks), "-H", hosts]


def _wait(process: subprocess.Popen[bytes], log: int, wanted: int, mark: str, deadline: float) -> int | None:
    """Return the exit status; None if the limit came first, or the ranks had answered and did not end."""
    answered, found, seen = False, 0, 0
    while process.poll() is None:
        if time.monotonic() > deadline:
            return None
        new = os.pread(log, os.fstat(log).st_size - seen, seen)
        whole = new.rfind(b"\n") + 1
        seen, found = seen + whole, found + new[:whole].count(mark.encode())
        if found >= wanted and not answered:
            answered, deadline = True, min(deadline, time.monotonic() + _EXIT_GRACE_S)
        time.sleep(_POLL_S if answered else 4 * _POLL_S)  # the ranks need the cores: look rarely
    return process.returncode
