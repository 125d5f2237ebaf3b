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
    """A start of the job that failed."""

    cause: Cause
    seconds: float
    step: int | None = None  # the last one that the failed rank reported, or any rank
    error: RankError | None = None


@dataclass(frozen=True)
class RestartDecision:
    """Restart after a pause, or give up for a reason."""

    pause_s: float | None  # None to give up
    reason: str
    first: Attempt  # whose error is the root cause


def judge(attempts: Sequence[Attempt], *, max_restarts: int) -> RestartDecision:
    """Decide what to do after `attempts`: all failed attempts, oldest first, at least one."""
    last = attempts[-1]
    if permanent := _permanent_failure(last):
        return RestartDecision(None, permanent, last)
    stuck = _attempts_without_progress(attempts)
    errors = [a.error.last_line if a.error else None for a in stuck[-_ATTEMPTS_WITH_ONE_ERROR:]]
    one_error = len(errors) == _ATTEMPTS_WITH_ONE_ERROR and errors[0] is not None and len(set(errors)) == 1
    if len(stuck) >= _ATTEMPTS_WITHOUT_PROGRESS or one_error:
        return RestartDecision(None, f"{len(stuck)} attempts in a row made no progress", stuck[0])
    if len(attempts) > max_restarts:
        used_up = f"all {max_restarts} restarts are used up" if max_restarts else "--max-restarts is 0"
        return RestartDecision(None, used_up, last)
    # After progress restart at once: the job itself works. Without progress double the pause.
    return RestartDecision(min(_LONGEST_PAUSE_S, 2.0 ** (len(stuck) - 1)) if stuck else 0.0, "", last)


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
