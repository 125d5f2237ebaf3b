"""Start ranks under horovodrun, wait for them up to a limit, and return what each printed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, islice
from pathlib import Path

from hvdtrain.errors import HvdTrainError, UsageError
from hvdtrain.launch import arguments, other_hosts, ssh
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.system import open_mpi, process_tree
from hvdtrain.system.start_ranks import horovodrun, rank_environment

_EXIT_GRACE_S = 20.0
_POLL_S = 0.05
_TAIL_LINES = 15
# What horovodrun puts before each piece of a rank's output: "[1,0]<stdout>:" over MPI, "[0]<stdout>:" over Gloo.
_TAG, _SPACED_TAG = (re.compile(rf"\[(\d+,)?(\d+)\]<(stdout|stderr)>:?{end}") for end in ("", "(?(1) ?)"))


class BenchError(HvdTrainError):
    """`hvdtrain bench` came to nothing; one line says why."""


class BenchUsageError(BenchError, UsageError):
    """Options that cannot be combined or reached."""


def parse_hosts(text: str | None, *, ranks: int, cores: int) -> LaunchSpec:
    """Return where `ranks` ranks run, by a list as for horovodrun -H; UsageError if slots or cores are too few."""
    arguments.whole_number("-np", str(ranks), least=1)
    hosts = {} if text is None else arguments.hosts(["-H", text])
    arguments.check_ranks(ranks, slots=hosts, elastic=False, cores=cores)
    return LaunchSpec(ranks=ranks, hosts=hosts)


@dataclass(frozen=True)
class LaunchOutcome:
    """How a launch ended."""

    status: int | None  # horovodrun's exit status; None where it had to be ended
    stdout: dict[int, str]  # rank -> what it printed there
    # rank -> all that it printed; -1 is what no rank can be named for, such as the launcher's own words
    streams: dict[int, str]

    def marked(self, mark: str) -> dict[int, str]:
        """Return rank -> the rest of the rank's line that begins with `mark`."""
        return {
            rank: line.removeprefix(mark)  # the last one
            for rank, stream in self.stdout.items()
            for line in stream.splitlines()
            if line.startswith(mark)
        }

    def last_words(self) -> str:
        """Return the rank and line of the first error found, and the end of what that rank printed."""
        failed = [rank for rank in sorted(self.streams) if "Traceback (most recent call last)" in self.streams[rank]]
        rank = next((rank for rank in failed if rank >= 0), failed[0] if failed else -1)
        lines = [line.rstrip() for line in self.streams.get(rank, "").splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith("HVDTRAIN_")]  # our own reports
        said = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:]) or "  (nothing)"
        error = _exception_line(lines) if failed else ""
        who = f"rank {rank}" if rank >= 0 else "the launcher"
        first = f"{who} raised {error.rstrip('.')}" if error else f"the last words are those of {who}"
        return f"{first}. The end of what it printed:\n{said}"


def _exception_line(lines: Iterable[str]) -> str:
    """Return the line that ends the first traceback, "ValueError: boom"."""
    traceback = dropwhile(lambda line: not line.startswith("Traceback (most recent call last)"), lines)
    return next((line for line in islice(traceback, 1, None) if not line.startswith((" ", "\t"))), "")


def run_ranks(
    spec: LaunchSpec,
    program: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout_s: float,
    mark: str,
    answers: int,
) -> LaunchOutcome:
    """Run `python PROGRAM...` on every rank, beside `environment`, and return what came of it.

    Once `answers` lines that begin with `mark` were printed, the ranks get 20 s to end, and are then ended.

    Raises:
        BenchError: horovodrun does not start, or another host cannot be reached.
    """
    line = [*_horovodrun(spec), sys.executable, *program]
    given = rank_environment({"PYTHONUNBUFFERED": "1", **environment})
    route = other_hosts.ssh_route(spec, given)
    lost = {} if route is None else ssh.on_every_host(route, "end", Path(tempfile.gettempdir(), "hvdtrain-bench"))
    if lost:
        raise BenchError("; ".join(f"host {host} {why}" for host, why in lost.items()))
    deadline = time.monotonic() + timeout_s
    # To a file, not a pipe: a grandchild that survives its parent would keep a pipe open.
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                line, env=given, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        except OSError as problem:
            raise BenchError(f"{line[0]} does not start: {problem}") from None
        # In a session of their own, ranks would outlive a command that is ended from outside.
        ending = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
        for each in ending:
            signal.signal(each, _exit)
        try:
            status = _wait(process, log.fileno(), answers, mark, deadline)
        finally:
            if process.poll() is None:
                process_tree.end(None, below=process.pid)
                process.wait()
            for each in ending:
                signal.signal(each, signal.SIG_DFL)
        log.seek(0)
        output = log.read().decode(errors="replace")
    return LaunchOutcome(status, *split_by_rank(output))


def _exit(number: int, frame: object) -> None:
    """Turn a signal into an exit that ends what was started."""
    sys.exit(128 + number)


def _horovodrun(spec: LaunchSpec) -> list[str]:
    named = ",".join(f"{name}:{slots}" for name, slots in spec.hosts.items())
    return [*horovodrun(Path(sys.executable)), "-np", str(spec.ranks), "-H", named or f"localhost:{spec.ranks}"]


def _wait(process: subprocess.Popen[bytes], log: int, wanted: int, mark: str, deadline: float) -> int | None:
    """Return the exit status; None if the limit came first, or the ranks had answered and did not end."""
    answered_at: float | None = None
    found = seen = 0
    while process.poll() is None:
        now = time.monotonic()
        if now > deadline or (answered_at is not None and now > answered_at + _EXIT_GRACE_S):
            return None
        new = os.pread(log, os.fstat(log).st_size - seen, seen)
        whole = new.rfind(b"\n") + 1
        seen, found = seen + whole, found + new[:whole].count(mark.encode())
        if answered_at is None and found >= wanted:
            answered_at = now
        # The ranks need the cores: look rarely.
        time.sleep(_POLL_S if answered_at is not None else 4 * _POLL_S)
    return process.returncode


def split_by_rank(output: str) -> tuple[dict[int, str], dict[int, str]]:
    """Return (rank -> its standard output, rank -> all of its output; -1 -> what stands before the first tag).

    A tag stands before every line, and also in the midst of one that reached the launcher in two pieces: the pieces
    of a rank, put together, are what it wrote.
    """
    pieces = (_SPACED_TAG if open_mpi.spaces_marks() else _TAG).split(output)
    stdout: dict[int, list[str]] = {}
    streams: dict[int, list[str]] = {-1: [pieces[0]]}
    for rank, kind, text in zip(map(int, pieces[2::4]), pieces[3::4], pieces[4::4], strict=True):
        for by_rank in (streams, stdout) if kind == "stdout" else (streams,):
            by_rank.setdefault(rank, []).append(text)
    joined = ({rank: "".join(texts) for rank, texts in by_rank.items()} for by_rank in (stdout, streams))
    return next(joined), next(joined)
