"""How many steps this rank has done."""

from __future__ import annotations

from hvdtrain.distributed.watchdog import waits

_steps = 0
_told = False  # by somebody who knows the number of the step


def step_done(step: int | None = None) -> None:
    """Note that a step is done.

    Args:
        step: how many steps are done, where the caller knows; from then on calls without it no longer count.
    """
    global _steps, _told
    if step is not None:
        _steps, _told = step, True
    elif not _told:
        _steps += 1


def done() -> int:
    """Return how many steps this rank has done, as far as it is known: told, counted, or counted by a graph."""
    return _steps if _told else max(_steps, waits.steps_in_graphs())
