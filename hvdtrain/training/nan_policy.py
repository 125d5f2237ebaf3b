"""The policies for a gradient that is not finite."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Mapping, Sequence

import numpy as np

from hvdtrain.adapter import Fault
from hvdtrain.data.sources import Batch
from hvdtrain.distributed.world import World
from hvdtrain.errors import NonFiniteError

log = logging.getLogger("hvdtrain")

_MOST_IN_A_ROW = 100
_NAMED = 16  # sample indices in a message
_ADVICE = (
    "Weights may hold NaN from here on. Move the checkpoints written since then away, or the next start resumes from "
    'NaN; then start again with nan_policy="raise", which names the first step, rank and samples, or with '
    'nan_policy="skip", which leaves such steps out. If there was a finite checkpoint, the newest one is kept.'
)
_ADVICE_UNDER_POLICY = "No step with non-finite gradients is taken, so look at the loss itself and at its data."


class NanPolicy:
    """Raises, stops or continues when a step's gradients are not finite; the same on all ranks."""

    def __init__(self, policy: str | None, world: World) -> None:
        self._policy = policy
        self._world = world
        self._in_a_row = 0
        self._warned = False

    def epoch_taken(self, logs: Mapping[str, float], *, epoch: int) -> None:
        """Warn of an epoch whose loss is not finite; once for several in a row."""
        bad = [name for name, value in logs.items() if name.endswith("loss") and not math.isfinite(value)]
        if bad and not self._warned and self._world.is_root:
            advice = _ADVICE if self._policy is None else _ADVICE_UNDER_POLICY
            log.warning("Epoch %d: %s is %s. %s", epoch + 1, bad[0], logs[bad[0]], advice)
        self._warned = bool(bad)

    def handle(self, fault: Fault | None, batches: Sequence[Batch], *, at: str) -> bool:
        """Count a step taken, or handle a refused one; return whether training stops, equal on all ranks.

        `at` names the step. With "raise", a refused step is a NonFiniteError on every rank.
        """
        if fault is None:
            self._in_a_row = 0
            return False
        self._in_a_row = self._in_a_row + 1 if fault.in_a_row is None else fault.in_a_row
        ago = f", about {fault.steps_ago} steps later" if fault.steps_ago > 1 else ", a step later" * fault.steps_ago
        text = f"{at}{ago}: {self._cause(fault, fault.batches or batches)}"
        if self._policy == "raise":
            raise NonFiniteError(
                f"{text} The step was not taken. Look at the samples and the learning rate; clip_norm bounds large "
                'gradients, nan_policy="skip" leaves such steps out.'
            )
        if self._in_a_row > _MOST_IN_A_ROW:
            raise NonFiniteError(f"{text} That was the {self._in_a_row}th step in a row which could not be taken.")
        if self._world.is_root:
            stops = "Training stops" if fault.is_late else "Training stops before this step"
            log.warning("%s %s.", text, "Skipped" if self._policy == "skip" else stops)
        return self._policy == "stop"

    def _cause(self, fault: Fault, batches: Sequence[Batch]) -> str:
        """Return which gradient is not finite, and on which rank and of which samples; equal on all ranks."""
        mine = [_report(fault, batches), fault.reduced]
        everyones = self._world.allgather_object(mine, name="nan_policy")
        found = [(rank, *report) for rank, (report, _) in enumerate(everyones) if report is not None]
        if found:
            rank, host, what = found[0]
            more = f" (and on {len(found) - 1} more ranks)" if found[1:] else ""
            return f"on rank {rank} ({host}){more} {what}."
        gradient = f"the gradient of {next((name for _, name in everyones if name is not None), None)}"
        if fault.is_restored:
            return (
                f"{gradient} is not finite. It was in flight when the checkpoint was saved, which does not say on "
                "which rank and for which samples it was computed."
            )
        if self._world.grid is not None:
            return (
                f"{gradient} is not finite, though the losses of all ranks are finite. So the samples that cause this "
                "are not known: a gradient overflows in backward, in the sum over ranks, or in fp16 compression."
            )
        return (
            f"{gradient} is not finite over all ranks, though it is on each: their sum overflows, or fp16 compression "
            "does."
        )


def _report(fault: Fault, batches: Sequence[Batch]) -> tuple[str, str] | None:
    """Return this host, and what is not finite of which of its samples; None if they are not the cause."""
    if fault.own is None and not fault.is_by_loss:
        return None
    samples = "of samples whose indices are not known"
    known = [batch.indices for batch in batches if batch.indices is not None]
    if known:
        indices = np.concatenate(known)
        more = f" and {len(indices) - _NAMED} more" if len(indices) > _NAMED else ""
        samples = f"of the samples {', '.join(map(str, indices[:_NAMED]))}{more}"
    loss = f"{fault.loss:.6g}" if math.isfinite(fault.loss) else "not finite"
    if fault.own is None:
        what = f"the loss {samples} is {loss}, and the gradient of {fault.reduced} is not finite"
    else:
        either = "" if math.isfinite(fault.loss) else " either"
        what = f"the gradient of {fault.own} is not finite, {samples}; the loss there is {loss}{either}"
    return socket.gethostname(), what
