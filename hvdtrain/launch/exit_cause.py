"""Find why a job ended, from the launcher's output about its ranks and the files that ranks leave."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile, takewhile
from pathlib import Path

from hvdtrain.distributed.launch_environment import named
from hvdtrain.distributed.watchdog import shared_facts
from hvdtrain.distributed.watchdog.rank_exit import STALLED, is_same
from hvdtrain.launch.rank_output import OutputLines
from hvdtrain.telemetry.rank_memory import NOTE

# What mpirun and horovodrun over Gloo print about the rank that ended first.
_REPORT = re.compile(
    rb"process rank (?P<rank_signal>\d+) with PID \S+ on node (?P<node>\S+) exited on\s+signal (?P<signal>\d+)(?=\D)"
    rb"|Process name: \[(?:\[\d+,\d+\]|\S+@\d+),(?P<rank_code>\d+)\]\s+Exit code:\s+(?P<code>\d+)(?=\D)"
    rb"|MPI_ABORT was invoked on rank (?P<rank_abort>\d+) in communicator [^\n]+\s+(?:Proc: [^\n]+\s+)?"
    rb"(?:with errorcode|Errorcode:) (?P<abort>\d+)(?=\D)"
    rb"|Process (?P<rank_gloo>\d+) exit with status code (?P<gloo>-?\d+)\."
    rb"|Remote daemon:\s+\S+ on node (?P<lost>\S+)\s"
)
# What Gloo prints if nothing arrives from another rank, not even the end of a connection.
_SILENCE = re.compile(rb"Timed out waiting (\d+)ms for")
# What mpirun prints before it waits for its daemons on other hosts to end theirs.
_ABORTED = b"the job has been aborted"
LAST_WORDS_S = 1.0  # for the other ranks to print, after a rank has failed: they cannot continue
LOST = 205  # mpirun's own status then; 5 ends with 0
SSH_FAILED = 255
_LONGEST = 400  # bytes of one of these texts
_END_BYTES = 2**19
_WAITED = "has waited too long for others"
# What a rank prints about its end: see `distributed.watchdog`.
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(:|$)")  # the line of a traceback that names it
_TORN_LINES = 3  # after the first one that is not indented
_SAID = re.compile(
    r"rank (\d+) \(host ([^)]*)\)(?:(?P<error> failed after \d+ steps:)"
    r"|(?P<followed>: ended because |: ended after the stall |: the same )|(?P<idle> has been in no collective for )"
    r"|(?P<waits> has waited ))"
)
_MISSING = re.compile(r"  rank (\d+) is missing: ")  # of the same host, after what it waits for
Said = dict[str, dict[int, str]]  # "error", "followed", "idle" or "waits" -> rank -> its host


@dataclass(frozen=True)
class Cause:
    """The end of one process."""

    who: str  # "rank 1 on host h", or the launcher's name
    code: int  # exit status, or 128 + signal
    rank: int | None = None  # None if it was not a rank
    how: str = ""  # how it ended, in words; "" if the status says it
    host: str = field(default="", compare=False)  # the rank's, as the launcher names it; "" if it does not

    @property
    def killed(self) -> bool:
        """True if a signal ended it."""
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
        self.cause: Cause | None = None  # the first report of a rank's end
        self.is_aborted = False  # whether the launcher has announced that it ends the job
        self._host, self._by_rank = host, by_rank
        self._lock = threading.Lock()
        self._ends = {"stdout": bytearray(), "stderr": bytearray()}

    def feed(self, stream: str, data: bytes) -> None:
        """Add a piece of the output of `stream`."""
        with self._lock:
            end = self._ends[stream]
            end += data
            new = max(0, len(end) - len(data) - _LONGEST)
            if self.cause is None and (found := _REPORT.search(end, new)):
                self.cause = self._read(found)
            self.is_aborted = self.is_aborted or end.find(_ABORTED, new) >= 0
            if len(end) > 2 * _END_BYTES:
                del end[:-_END_BYTES]

    def host_of(self, rank: int) -> str:
        """Return the host of a rank, "" where it is not known."""
        return self._by_rank[rank] if rank < len(self._by_rank) else "" if self._by_rank else self._host

    def text(self) -> str:
        """Return the end of the output."""
        with self._lock:
            return "".join(bytes(end).decode(errors="replace") for end in self._ends.values())

    def _read(self, found: re.Match[bytes]) -> Cause:
        said = {name: value.decode() for name, value in found.groupdict().items() if value is not None}
        if "lost" in said:
            return Cause(f"host {said['lost']}", LOST, how="no longer answers")
        rank = int(next(value for name, value in said.items() if name.startswith("rank_")))
        code = int(next(said[name] for name in ("signal", "code", "abort", "gloo") if name in said))
        code = code + 128 if "signal" in said else 128 - code if code < 0 else code
        host, how = said.get("node") or self.host_of(rank), ""
        if "gloo" in said and code == SSH_FAILED and host not in ("", self._host):
            how = "was killed, or the connection to it broke (ssh's status 255)"
        if "gloo" in said and code == 1 and (silence := _SILENCE.search(self._ends["stderr"])):
            limit_s = int(silence[1]) // 1000
            how = f"heard nothing from another one for {limit_s} s, whose host, network or process hangs"
        return Cause(f"rank {rank}" + f" on host {host}" * bool(host), code, rank, how, host)


@dataclass(frozen=True)
class RankError:
    """An exception that ended a rank, as the rank wrote it to a file (`distributed.watchdog`) or printed it."""

    rank: int
    host: str
    text: str
    is_printed: bool = False  # it is in the launcher's output

    @property
    def last_line(self) -> str:
        """The line that names the exception."""
        # What is added of the rank's memory differs from attempt to attempt.
        lines = [line for line in self.text.splitlines() if line.strip() and not line.startswith(NOTE)]
        return lines[-1].strip() if lines else ""

    @property
    def name(self) -> str:
        """The class's name, without its module."""
        return self.last_line.partition(":")[0].rpartition(".")[2]

    def is_like(self, other: RankError) -> bool:
        """Return whether it is the same exception, of the same rank or of another rank."""
        return is_same(self.last_line, self.rank, other.last_line, other.rank)


def first_error(run_dir: Path, *, listener: Listener, cause: Cause) -> RankError | None:
    """Return the exception that ended a rank first, by error-<rank>.json or the launcher's output; None if none did."""
    written = sorted(shared_facts.read(run_dir, "error").values(), key=lambda found: float(found["time"]))
    errors = [RankError(int(found["rank"]), str(found["host"]), str(found["text"]).rstrip()) for found in written]
    if errors or cause.killed:  # what the peers of a killed rank raise is a consequence, not the reason
        first = next((error for error in errors if not cause.killed or error.rank == cause.rank), None)
        return first and replace(first, is_printed=first.last_line in listener.text())
    printed: dict[int, list[str]] = {}
    for number, line in OutputLines().all(listener.text().encode()):
        if number is not None:
            printed.setdefault(number, []).append(line)
    for rank in sorted(printed, key=lambda rank: rank != cause.rank):
        if text := traceback_in(printed[rank]):
            return RankError(rank, listener.host_of(rank), text, is_printed=True)
    return None


def traceback_in(lines: Sequence[str]) -> str:
    """Return the first traceback in a rank's output, "" if there is none."""
    after = [*dropwhile(lambda line: not line.startswith("Traceback (most recent call last)"), lines)]
    inside = [*takewhile(lambda line: not line.strip() or line.startswith((" ", "\t")), after[1:])]
    end = len(inside) + 2
    # A launcher's own line, written into one of the rank's, leaves the rest of that without its spaces.
    closing = after[end - 1 : end - 1 + _TORN_LINES]
    torn = next((number for number, line in enumerate(closing) if _EXCEPTION.match(line)), 0)
    return "\n".join(after[: end + torn]).rstrip()


def said_by_ranks(output: str) -> Said:
    """Return the ranks' own lines about their end, which `distributed.watchdog` prints, in the order of the output."""
    found: Said = {"error": {}, "followed": {}, "idle": {}, "waits": {}}
    for number, line in OutputLines().all(output.encode()):
        said, missing = _SAID.match(line), _MISSING.match(line)
        if said is not None and said.lastgroup and int(said[1]) == number:
            found[said.lastgroup].setdefault(number, said[2])
        elif missing is not None and number in found["waits"]:
            found["idle"].setdefault(int(missing[1]), found["waits"][number])
    return found


def root_cause(run_dir: Path, cause: Cause, *, host: str, said: Said | None = None, size: int = 0) -> Cause:
    """Return the end of the rank that caused the end in `cause`; `cause` itself if no such rank is known.

    A launcher reports the rank that ended first. It may have ended because another rank failed, left or hung before.
    `run_dir` has what ranks of this host have written. Of ranks of other hosts there is only what they `said`; `size`
    is the number of all ranks, 0 if it is not known.
    """
    errors, followed = shared_facts.read(run_dir, "error"), shared_facts.read(run_dir, "followed")
    said = said or {"error": {}, "followed": {}, "idle": {}}
    stalled = cause.code == STALLED
    if cause.killed or not (stalled or cause.rank in errors or cause.rank in {*followed, *said["followed"]}):
        return cause
    if errors:
        first = min(errors.values(), key=lambda found: float(found["time"]))
        return Cause(f"rank {first['rank']} on host {first['host']}", 1, int(first["rank"]))
    for rank, where in said["error"].items():
        return Cause(f"rank {rank} on host {where}", 1, rank)
    ended, idle = shared_facts.read(run_dir, "ended"), shared_facts.read(run_dir, "idle")
    waits = shared_facts.read(run_dir, "waits") | followed
    silent = [rank for rank in shared_facts.read(run_dir, "pid") if rank not in waits] if stalled else []
    for ranks, how in (
        ([*ended], "ended early (by sys.exit, or at the end of the script)"),
        ([*idle], "hung{at}"),
        (silent, "hung"),
    ):
        if ranks:
            place = idle.get(ranks[0], {}).get("place")
            how = how.format(at=f" (at {place})" if place else "")
            return Cause(f"{named(ranks)} on host {host}", cause.code, ranks[0], how)
    for rank, where in said["idle"].items():
        return Cause(f"rank {rank} on host {where}", cause.code, rank, "hung")
    if stalled:
        return replace(cause, how=_WAITED)
    others = {*range(size)} - {*followed, *said["followed"]}
    if len(others) == 1 and not cause.how:  # every other rank has said that it ended because of another one
        rank = others.pop()
        return Cause(f"rank {rank}", cause.code, rank, "ended first, without a message")
    return replace(cause, how=cause.how or "ended because another rank had failed or ended first")


def reported_by_ranks(run_dir: Path, *, host: str) -> Cause | None:
    """Return why a rank of this host ended, by its error-<rank>.json or waits-<rank>.json; None without these."""
    for fact, code, how in (("error", 1, ""), ("waits", STALLED, _WAITED)):
        rank = next(iter(shared_facts.read(run_dir, fact)), None)
        if rank is not None:
            return Cause(f"rank {rank} on host {host}", code, rank, how)
    return None


def latest_step(run_dir: Path, *, rank: int | None) -> int | None:
    """Return the job's last step by the ranks' progress-<rank>.json; None if no rank has written one."""
    # That of `rank`, which ended first, if it has one: its peers may have taken more, each time another number.
    steps = {number: int(found["step"]) for number, found in shared_facts.read(run_dir, "progress").items()}
    return steps.get(-1 if rank is None else rank, max(steps.values(), default=None))
