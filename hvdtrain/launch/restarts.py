"""Decide, from the attempts so far, whether a failed job is restarted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.launch.exit_cause import Cause, RankError

# Without word of any step, an attempt that lasted so long is taken to have got somewhere.
LONG_S = 60.0
_BARREN_LIMIT = 3
_BARREN_LIMIT_OF_ONE_ERROR = 2
_LONGEST_PAUSE_S = 30.0
# What another attempt would meet again.
_HOPELESS = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError")
_USAGE = (2, 126, 127)  # wrong arguments; no such program


@dataclass(frozen=True)
class Attempt:
    """One start of the job that failed.

    Attributes:
        cause: what ended it.
        seconds: how long it lasted.
        step: the last step that the rank which ended told of, or any rank.
        error: the exception that ended it, if one did.
    """

    cause: Cause
    seconds: float
    step: int | None = None
    error: RankError | None = None


@dataclass(frozen=True)
class Verdict:
    """What follows a failed attempt: a pause and a further one, or the reason why there is none.

    Attributes:
        pause_s: before the next attempt; None to give up.
        reason: why to give up.
        first: the attempt whose error says what went wrong.
    """

    pause_s: float | None
    reason: str
    first: Attempt


def judge(attempts: Sequence[Attempt], *, max_restarts: int) -> Verdict:
    """Return what to do after `attempts`, all failed, oldest first, of which there is at least one."""
    last = attempts[-1]
    hopeless = _hopeless(last)
    if hopeless:
        return Verdict(None, hopeless, last)
    barren = _barren(attempts)
    same_error = [a.error.last_line if a.error else None for a in barren[-_BARREN_LIMIT_OF_ONE_ERROR:]]
    if len(barren) >= _BARREN_LIMIT or (
        len(same_error) == _BARREN_LIMIT_OF_ONE_ERROR and same_error[0] is not None and len(set(same_error)) == 1
    ):
        return Verdict(None, f"{len(barren)} attempts in a row came no further", barren[0])
    if len(attempts) > max_restarts:
        return Verdict(None, _used_up(max_restarts), last)
    # At once after progress: what killed it was not the job itself. Else longer and longer.
    return Verdict(min(_LONGEST_PAUSE_S, 2.0 ** (len(barren) - 1)) if barren else 0.0, "", last)


def _used_up(max_restarts: int) -> str:
    return f"all {max_restarts} restarts are used up" if max_restarts else "no restarts were asked for"


def _hopeless(attempt: Attempt) -> str:
    if attempt.step is not None:
        return ""
    if attempt.cause.code in _USAGE:
        return "it would end the same way again"
    name = attempt.error.last_line.partition(":")[0].rpartition(".")[2] if attempt.error else ""
    return "it would fail the same way again" if name in _HOPELESS else ""


def _barren(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the latest attempts that came no further than all before them, oldest first."""
    trailing: list[Attempt] = []
    best = -1
    for attempt in attempts:
        if attempt.step is not None and attempt.step > best:
            best, trailing = attempt.step, []
        elif attempt.step is None and attempt.seconds >= LONG_S:
            trailing = []
        else:
            trailing.append(attempt)
    return trailing
