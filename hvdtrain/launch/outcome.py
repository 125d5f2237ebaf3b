"""How a function's run ended: the values that it returned, or why there are none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from hvdtrain.errors import RankFailedError
from hvdtrain.launch.exchange import Message
from hvdtrain.launch.exit_cause import Cause
from hvdtrain.system.settings import EXIT_STOPPED


@dataclass
class Outcome:
    """How a function's run ended."""

    size: int  # number of ranks
    answers: dict[int, Message] = field(default_factory=dict)  # facts["kind"] is "result", "error" or "exit"
    cause: Cause | None = None  # what ended the job; None where nobody can tell
    seconds: float = 0.0
    tails: dict[int | None, list[str]] = field(default_factory=dict)  # a rank's last lines; None: the launcher's
    status: int = 0  # exit status of the process that ran the ranks

    def of_kind(self, kind: str) -> dict[int, Message]:
        """Return the answers of a kind, by rank."""
        return {rank: self.answers[rank] for rank in sorted(self.answers) if self.answers[rank].facts["kind"] == kind}

    def values(self, *, root_only: bool = False) -> list[Any]:
        """Return what the function returned on each rank, or raise `problem`; the answers are gone then.

        What cannot be unpickled here is a TypeError. With `root_only`, only rank 0's lines were shown.
        """
        problem = self.problem(root_only=root_only)
        if problem is not None:
            raise problem
        return [_value(rank, self.answers.pop(rank)) for rank in range(self.size)]

    def problem(self, *, root_only: bool = False) -> Exception | None:
        """Return the exception to raise, a rank's own or a RankFailedError; None if every rank has returned."""
        failed, cause = self.of_kind("error"), self.cause
        own = {rank: answer for rank, answer in failed.items() if not answer.facts["others"]}
        # If a rank was killed or has left, the errors of other ranks are a consequence, not the cause.
        silent = cause if cause is not None and cause.rank not in self.answers else None
        killed = silent is not None and silent.killed
        left = killed or (silent is not None and silent.rank is not None) or self.of_kind("exit")
        first = min(own or failed, key=lambda rank: float(failed[rank].facts["time"]), default=None)
        if first is not None and ((first in own and not killed) or not left):
            return _raised(first, failed[first])
        return self._without_result(root_only=root_only) if len(self.of_kind("result")) < self.size else None

    def _without_result(self, *, root_only: bool) -> RankFailedError:
        """Return the error for ranks that ended without an answer."""
        if self.cause is None:
            return RankFailedError(f"the process that ran the ranks ended with status {self.status}; so did they")
        rank, code, text = self.cause.rank, self.cause.code, f"{self.cause} after {self.seconds:.0f} s"
        exits = {rank: answer.facts["code"] for rank, answer in self.of_kind("exit").items()}
        left = next((rank for rank in exits if exits[rank] == code), None)
        if rank is None and left is not None and code:  # Open MPI 5 does not always say which rank it was
            rank, text = left, f"rank {left} ended with status {code} after {self.seconds:.0f} s"
        elif code in (0, EXIT_STOPPED) or rank in self.of_kind("error"):  # that rank was not the first
            rank = next(iter([*exits, *(rank for rank in range(self.size) if rank not in self.answers)]))
            text = f"rank {rank} ended by itself, with status {exits.get(rank, code)}"
        # Lines that were not shown yet.
        lines = [line for line in self.tails.get(rank, ()) if line.strip() and (rank is None or (root_only and rank))]
        end = "; the end of what it printed:\n" + "\n".join(lines) if lines else ""
        return RankFailedError(f"{text}, before the function had returned{end}", rank=rank)


def _raised(rank: int, answer: Message) -> Exception:
    """Return what a rank raised: itself where it can be made again here."""
    facts = answer.facts
    where = RankFailedError(f"rank {rank} on host {facts['host']} {facts['what']}:\n{facts['text']}", rank=rank)
    try:
        error = cloudpickle.loads(answer.pickled)
    except Exception:  # noqa: BLE001 - its class may do or lack anything
        error = None
    if not isinstance(error, Exception):  # a rank's KeyboardInterrupt is not this process's
        return where
    error.__cause__ = where
    return error


def _value(rank: int, answer: Message) -> Any:
    try:
        (returned,) = cloudpickle.loads(answer.pickled)
    except Exception as error:
        raise TypeError(f"what rank {rank} returned cannot be read here: {error}") from error
    return returned
