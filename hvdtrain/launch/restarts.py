"""Decide, from the attempts so far, whether a failed job is restarted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.launch.exit_cause import Cause, RankError

# An attempt that reported no step counts as progress if it lasted this long.
LONG_S = 60.0
_ATTEMPTS_WITHOUT_PROGRESS = 3
_ATTEMPTS_WITH_ONE_ERROR = 2
_LONGEST_PAUSE_S = 30.0
# Errors that would occur in every attempt.
_PERMANENT_ERRORS = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError")
_USAGE = (2, 126, 127)  # wrong arguments; no such program


@dataclass(frozen=True)
class Attempt:
    """A start of the job that failed.

    Attributes:
        cause: what ended it.
        seconds: how long it lasted.
        step: the last step that the failed rank reported, or any rank.
        error: the exception that ended it, if any.
    """

    cause: Cause
    seconds: float
    step: int | None = None
    error: RankError | None = None


@dataclass(frozen=True)
class RestartDecision:
    """Restart after a pause, or give up for a reason.

    Attributes:
        pause_s: time until the next attempt; None to give up.
        reason: why to give up.
        first: the attempt whose error is the root cause.
    """

    pause_s: float | None
    reason: str
    first: Attempt


def judge(attempts: Sequence[Attempt], *, max_restarts: int) -> RestartDecision:
    """Decide what to do after `attempts`: all failed attempts, oldest first, at least one."""
    last = attempts[-1]
    permanent = _permanent_failure(last)
    if permanent:
        return RestartDecision(None, permanent, last)
    stuck = _attempts_without_progress(attempts)
    errors = [a.error.last_line if a.error else None for a in stuck[-_ATTEMPTS_WITH_ONE_ERROR:]]
    one_error = len(errors) == _ATTEMPTS_WITH_ONE_ERROR and errors[0] is not None and len(set(errors)) == 1
    if len(stuck) >= _ATTEMPTS_WITHOUT_PROGRESS or one_error:
        return RestartDecision(None, f"{len(stuck)} attempts in a row made no progress", stuck[0])
    if len(attempts) > max_restarts:
        return RestartDecision(None, _used_up(max_restarts), last)
    # After progress restart at once: the job itself works. Without progress double the pause.
    return RestartDecision(min(_LONGEST_PAUSE_S, 2.0 ** (len(stuck) - 1)) if stuck else 0.0, "", last)


def _used_up(max_restarts: int) -> str:
    return f"all {max_restarts} restarts are used up" if max_restarts else "--max-restarts is 0"


def _permanent_failure(attempt: Attempt) -> str:
    """Return why another attempt would fail in the same way; "" if it might not."""
    if attempt.step is not None:
        return ""
    if attempt.cause.code in _USAGE:
        return "it would end the same way again"
    name = attempt.error.last_line.partition(":")[0].rpartition(".")[2] if attempt.error else ""
    return "it would fail the same way again" if name in _PERMANENT_ERRORS else ""


def _attempts_without_progress(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts since the last progress, oldest first. Progress is a step beyond all earlier ones."""
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
