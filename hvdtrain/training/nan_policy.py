"""What to do about a gradient that is not finite."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Mapping, Sequence
from typing import Any

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
        bad = [name for name in ("loss", "val_loss") if not math.isfinite(logs.get(name, 0.0))]
        if bad and not self._warned and self._world.is_root:
            advice = _ADVICE if self._policy is None else _ADVICE_UNDER_POLICY
            log.warning("Epoch %d: %s is %s. %s", epoch + 1, bad[0], logs[bad[0]], advice)
        self._warned = bool(bad)

    def step_taken(self) -> None:
        """Note that a step was taken."""
        self._in_a_row = 0

    def step_refused(self, fault: Fault, batches: Sequence[Batch], *, step: int, epoch: int) -> bool:
        """Handle a step that the adapter refused; return whether training must stop, equal on all ranks."""
        self._in_a_row += 1
        indices = [batch.indices for batch in batches if batch.indices is not None]
        report = {
            "host": socket.gethostname(),
            "own": fault.own,
            "loss": str(fault.loss),  # JSON has no NaN
            "samples": np.concatenate(indices)[:_NAMED].tolist() if indices else None,
            "more": max(0, sum(map(len, indices)) - _NAMED),
        }
        text = describe(fault, self._world.allgather_object(report, name="nan_policy"), step=step, epoch=epoch)
        if self._policy == "raise":
            raise NonFiniteError(
                f"{text} The step was not taken. Look at those samples and the learning rate; clip_norm bounds large "
                'gradients, nan_policy="skip" leaves such steps out.'
            )
        if self._in_a_row > _MOST_IN_A_ROW:
            raise NonFiniteError(f"{text} That was the {self._in_a_row}th step in a row which could not be taken.")
        if self._world.is_root:
            log.warning("%s %s.", text, "Skipped" if self._policy == "skip" else "Training stops before this step")
        return self._policy == "stop"


def describe(fault: Fault, reports: Sequence[dict[str, Any]], *, step: int, epoch: int) -> str:
    """Return one or two sentences that name the step, ranks, gradients and samples."""
    where = f"Step {step + 1} of epoch {epoch + 1}"
    culprits = [(rank, report) for rank, report in enumerate(reports) if report["own"] is not None]
    if not culprits:
        return (
            f"{where}: the gradient of {fault.reduced} is not finite over all ranks, though it is on each: their sum "
            "overflows, or fp16 compression does."
        )
    rank, report = culprits[0]
    samples = "of samples whose indices are not known"
    if report["samples"] is not None:
        more = f" and {report['more']} more" if report["more"] else ""
        samples = f"of the samples {', '.join(map(str, report['samples']))}{more}"
    others = f" (and on {len(culprits) - 1} more ranks)" if len(culprits) > 1 else ""
    loss = float(report["loss"])
    shown = "not finite either" if not math.isfinite(loss) else f"{loss:.6g}"
    return (
        f"{where}: on rank {rank} ({report['host']}){others} the gradient of {report['own']} is not finite, {samples}; "
        f"the loss there is {shown}."
    )
