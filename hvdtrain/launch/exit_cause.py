"""Why a job ended: what the launcher says of its ranks, and what the ranks left behind."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.distributed.watchdog.rank_exit import STALLED
from hvdtrain.launch.rank_output import OutputLines

# What mpirun and horovodrun over Gloo say of the rank that ended first.
_SAID = re.compile(
    rb"process rank (?P<rank_signal>\d+) with PID \S+ on node (?P<node>\S+) exited on\s+signal (?P<signal>\d+)(?=\D)"
    rb"|Process name: \[(?:\[\d+,\d+\]|\S+@\d+),(?P<rank_code>\d+)\]\s+Exit code:\s+(?P<code>\d+)(?=\D)"
    rb"|MPI_ABORT was invoked on rank (?P<rank_abort>\d+) in communicator [^\n]+\s+(?:Proc: [^\n]+\s+)?"
    rb"(?:with errorcode|Errorcode:) (?P<abort>\d+)(?=\D)"
    rb"|Process (?P<rank_gloo>\d+) exit with status code (?P<gloo>-?\d+)\."
    rb"|Remote daemon:\s+\S+ on node (?P<lost>\S+)\s"
)
# What Gloo says where nothing came from another rank, not even the end of a connection.
_SILENCE = re.compile(rb"Timed out waiting (\d+)ms for")
# What mpirun says before it waits for its daemons on other hosts to end theirs.
_ABORTED = b"the job has been aborted"
LOST = 205  # mpirun's own status then; 5 ends with 0
_SSH_FAILED = 255
_LONGEST = 400  # bytes that one of them takes
_KEPT_BYTES = 2**19


@dataclass(frozen=True)
class Cause:
    """The end of one process.

    Attributes:
        who: "rank 1 on host h", or the launcher's name.
        code: exit status, or 128 + signal.
        rank: None where it was not a rank.
        how: it ended, in words, where its status says little.
    """

    who: str
    code: int
    rank: int | None = None
    how: str = ""

    @property
    def killed(self) -> bool:
        """Whether it was a signal."""
        return 128 < self.code < 128 + signal.NSIG

    def __str__(self) -> str:
        return f"{self.who} " + (
            self.how or (f"was killed by signal {self.code - 128}" if self.killed else f"ended with status {self.code}")
        )


class Listener:
    """Reads what a launcher prints; stores the end of it, and the first rank that it reports as ended.

    `by_rank` has the host of each rank, "" for an unknown one; without it all are on `host`, this one.
    """

    def __init__(self, host: str, by_rank: Sequence[str] = ()) -> None:
        self._host = host
        self._by_rank = by_rank
        self._is_aborted = False
        self._lock = threading.Lock()
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        self._cause: Cause | None = None

    def hear(self, stream: str, data: bytes) -> None:
        """Take what came through `stream`."""
        with self._lock:
            kept = self._kept[stream]
            kept += data
            new = max(0, len(kept) - len(data) - _LONGEST)
            if self._cause is None:
                found = _SAID.search(kept, new)
                if found:
                    self._cause = self._read(found)
            self._is_aborted = self._is_aborted or kept.find(_ABORTED, new) >= 0
            if len(kept) > 2 * _KEPT_BYTES:
                del kept[:-_KEPT_BYTES]

    def cause(self) -> Cause | None:
        """Return what was said first of a rank's end, None if nothing was."""
        with self._lock:
            return self._cause

    def is_aborted(self) -> bool:
        """Return whether the launcher has said that it ends the job."""
        with self._lock:
            return self._is_aborted

    def host_of(self, rank: int) -> str:
        """Return the host of a rank, "" where it is not known."""
        return self._by_rank[rank] if rank < len(self._by_rank) else "" if self._by_rank else self._host

    def text(self) -> str:
        """Return the end of what was printed."""
        with self._lock:
            return "".join(bytes(kept).decode(errors="replace") for kept in self._kept.values())

    def _read(self, found: re.Match[bytes]) -> Cause:
        facts = {name: value.decode() for name, value in found.groupdict().items() if value is not None}
        if "lost" in facts:
            return Cause(f"host {facts['lost']}", LOST, how="no longer answers")
        rank = int(next(value for name, value in facts.items() if name.startswith("rank_")))
        code = int(next(facts[name] for name in ("signal", "code", "abort", "gloo") if name in facts))
        if "signal" in facts:
            code += 128
        elif code < 0:
            code = 128 - code
        host = facts.get("node") or self.host_of(rank)
        by_ssh = "gloo" in facts and code == _SSH_FAILED and host not in ("", self._host)
        how = "was killed, or the connection to it broke (ssh's status 255)" if by_ssh else ""
        silence = _SILENCE.search(self._kept["stderr"])
        if silence and "gloo" in facts and code == 1:
            how = (
                f"heard nothing from another one for {int(silence[1]) // 1000} s, whose host, network or process hangs"
            )
        return Cause(f"rank {rank}" + f" on host {host}" * bool(host), code, rank, how)


@dataclass(frozen=True)
class RankError:
    """An exception that ended a rank, as the rank itself wrote it down (`distributed.watchdog`) or printed it."""

    rank: int
    host: str
    text: str

    @property
    def last_line(self) -> str:
        """The line that names the exception."""
        return next((line for line in reversed(self.text.splitlines()) if line.strip()), "").strip()


def first_error(run_dir: Path, *, listener: Listener, cause: Cause) -> RankError | None:
    """Return the exception that ended a rank first, None if it was no exception.

    Args:
        run_dir: where ranks write error-<rank>.json.
        listener: knows the end of the launcher's output, which is searched where no rank has written one.
        cause: what ended the job. What the peers of a killed rank raise is a consequence, not the reason.
    """
    written = []
    for path in run_dir.glob("error-*.json"):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            error = RankError(int(found["rank"]), str(found["host"]), str(found["text"]).rstrip())
            written.append((float(found["time"]), error))
        except (OSError, ValueError, KeyError, TypeError):  # not whole: the process was killed
            continue
    if cause.killed:
        return next((error for _, error in written if error.rank == cause.rank), None)
    if written:
        return min(written, key=lambda item: item[0])[1]
    streams = _by_rank(listener.text())
    for rank in sorted(streams, key=lambda rank: rank != cause.rank):
        text = _traceback(streams[rank])
        if text:
            return RankError(rank, listener.host_of(rank), text)
    return None


def reported_by_ranks(run_dir: Path, *, host: str) -> Cause | None:
    """Return why a rank of this host ended, by its error-<rank>.json or waits-<rank>.json; None without these."""
    for fact, code in (("error", 1), ("waits", STALLED)):
        ranks = sorted(int(path.stem.rpartition("-")[2]) for path in run_dir.glob(f"{fact}-*.json"))
        if ranks:
            how = "has waited too long for others" if code == STALLED else ""
            return Cause(f"rank {ranks[0]} on host {host}", code, ranks[0], how)
    return None


def _by_rank(printed: str) -> dict[int, list[str]]:
    """Return rank -> the lines that it printed, without the launcher's own."""
    found: dict[int, list[str]] = {}
    lines = OutputLines()
    for rank, text in [*lines.feed(printed.encode()), *lines.end()]:
        if rank is not None:
            found.setdefault(rank, []).append(text)
    return found


def _traceback(lines: list[str]) -> str:
    """Return the first traceback in what a rank printed, "" if there is none."""
    begin = next((i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")), None)
    if begin is None:
        return ""
    end = begin + 1
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith((" ", "\t"))):
        end += 1
    return "\n".join(lines[begin : end + 1]).rstrip()


def latest_step(run_dir: Path, *, rank: int | None) -> int | None:
    """Return the job's last step by the ranks' progress-<rank>.json; None if no rank has written one.

    Args:
        run_dir: where these files are.
        rank: the rank that ended first. Its step measures the progress of the attempt: its peers may have taken some
            more steps, a different number each time.
    """
    steps = {}
    for path in run_dir.glob("progress-*.json"):
        try:
            step = int(json.loads(path.read_text(encoding="utf-8"))["step"])
            steps[path.stem.removeprefix("progress-")] = step
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return steps.get(str(rank), max(steps.values(), default=None))


def rank_pids(run_dir: Path) -> dict[int, int]:
    """Return rank -> process id, as far as ranks have written pid-<rank>."""
    pids = {}
    for path in run_dir.glob("pid-*"):
        try:
            pids[int(path.name.removeprefix("pid-").removesuffix(".json"))] = int(path.read_text())
        except (OSError, ValueError):
            continue
    return pids
