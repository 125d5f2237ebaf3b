"""What came of a function's run: the values, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import cloudpickle

from hvdtrain.errors import RankFailedError
from hvdtrain.launch.exchange import Message, each
from hvdtrain.launch.exit_cause import Cause
from hvdtrain.system.settings import EXIT_STOPPED


class Ended(Protocol):
    """A function's run that has ended; `hvdtrain.launch.call.Call` says what these are."""

    @property
    def cause(self) -> Cause | None: ...  # noqa: D102
    @property
    def seconds(self) -> float: ...  # noqa: D102
    @property
    def answers(self) -> Mapping[int, Message]: ...  # noqa: D102

    def tail(self, rank: int | None) -> Sequence[str]: ...  # noqa: D102
    def status(self) -> int: ...  # noqa: D102


def problem(call: Ended, np: int, *, root_only: bool) -> Exception | None:
    """Return what is to be raised; None where every rank has returned."""
    failed = dict(each(call.answers, "error"))
    own = {rank: answer for rank, answer in failed.items() if not answer.facts["others"]}
    # What the peers of a rank that was killed, or has left, raise is a consequence, not the reason.
    cause = call.cause
    killed = cause is not None and cause.killed and cause.rank not in call.answers
    lost = cause is not None and cause.rank is not None and cause.rank not in call.answers
    left = killed or lost or any(each(call.answers, "exit"))
    first = min(own or failed, key=lambda rank: float(failed[rank].facts["time"]), default=None)
    if first is not None and ((first in own and not killed) or not left):
        return _raised(first, failed[first])
    if len(dict(each(call.answers, "result"))) < np:
        return _without_result(call, np, root_only=root_only)
    return None


def _raised(rank: int, answer: Message) -> Exception:
    """Return what a rank raised: itself where it can be made again here."""
    facts = answer.facts
    where = RankFailedError(f"rank {rank} on host {facts['host']} {facts['what']}:\n{facts['text']}", rank=rank)
    try:
        error = cloudpickle.loads(answer.pickled)
    except Exception:  # noqa: BLE001 - its class may do or lack anything
        return where
    if not isinstance(error, Exception):  # a rank's KeyboardInterrupt is not this process's
        return where
    error.__cause__ = where
    return error


def _without_result(call: Ended, np: int, *, root_only: bool) -> RankFailedError:
    """Return the error for ranks that ended without a word."""
    if call.cause is None:
        return RankFailedError(f"the process that ran the ranks ended with status {call.status()}; so did they")
    rank, text = call.cause.rank, f"{call.cause} after {call.seconds:.0f} s"
    failed, exits = (dict(each(call.answers, kind)) for kind in ("error", "exit"))
    left = next((left for left in exits if exits[left].facts["code"] == call.cause.code), None)
    if rank is None and left is not None and call.cause.code:  # Open MPI 5 does not always say which rank it was
        rank, text = left, f"rank {left} ended with status {call.cause.code} after {call.seconds:.0f} s"
    elif call.cause.code in (0, EXIT_STOPPED) or rank in failed:  # that rank is not where it began
        silent = [rank for rank in range(np) if rank not in call.answers]
        rank = next(iter([*exits, *silent]))
        status = exits[rank].facts["code"] if rank in exits else call.cause.code
        text = f"rank {rank} ended by itself, with status {status}"
    # What nobody has seen yet.
    said = [line for line in call.tail(rank) if line.strip()] if rank is None or (root_only and rank) else []
    end = "; the end of what it printed:\n" + "\n".join(said) if said else ""
    return RankFailedError(f"{text}, before the function had returned{end}", rank=rank)


def value(rank: int, answer: Message) -> Any:
    """Return what a rank returned.

    Raises:
        TypeError: it cannot be unpickled here.
    """
    try:
        (returned,) = cloudpickle.loads(answer.pickled)
    except Exception as error:
        raise TypeError(f"what rank {rank} returned cannot be read here: {error}") from error
    return returned
