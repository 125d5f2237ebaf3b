"""Updates that a compiled step skips: how they are reported to the host, and what they must leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from hvdtrain.adapter import Fault
from hvdtrain.keras.backends import backend_module
from hvdtrain.keras.training_state import metric_variables


@dataclass(frozen=True)
class SkippedUpdate:
    """An update that was not made.

    Attributes:
        reduced: path of the first variable whose reduced gradient is not finite.
        own: path of the first whose gradient on this rank alone is not; None where all are finite.
        by_scaling: whether loss scaling skipped it, to try again at a lower scale.
    """

    reduced: str
    own: str | None
    by_scaling: bool


class SkippedUpdates:
    """Receives, on the host, what the compiled step reports."""

    def __init__(self) -> None:
        self._last: SkippedUpdate | None = None

    def report(self, paths: Sequence[str], by_scaling: bool, own: Any, reduced: Any) -> None:
        """Note an update that was skipped.

        Args:
            paths: of the variables.
            by_scaling: see `SkippedUpdate`; then `reduced` equals `own`.
            own: for each variable, whether its gradient on this rank is not finite.
            reduced: likewise, over all ranks.
        """
        self._last = SkippedUpdate(_first(paths, reduced) or "none", _first(paths, own), by_scaling)

    def take(self) -> SkippedUpdate | None:
        """Return what was reported since the last call."""
        last, self._last = self._last, None
        return last


def _first(paths: Sequence[str], flags: Any) -> str | None:
    return next((path for path, flag in zip(paths, np.asarray(flags), strict=True) if flag), None)


class StepSnapshot:
    """What a step changes before its gradient is known: running statistics, seeds, metrics, the loss scale.

    Args:
        model: compiled, its optimizer distributed.
        skipped: where its updates are reported.
        everything: whether a skipped step leaves nothing behind; else only its loss is reported.
    """

    def __init__(self, model: keras.Model, skipped: SkippedUpdates, *, everything: bool) -> None:
        self._model = model
        self._skipped = skipped
        self._everything = everything
        self._before: list[tuple[Any, Any]] = []

    def save(self) -> None:
        """Copy the values from before the step."""
        model, optimizer = self._model, self._model.optimizer
        saved = list(model._loss_tracker.variables)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            saved += [optimizer.step_counter, optimizer.dynamic_scale]
        if self._everything:
            saved += [*metric_variables(model), *model.non_trainable_variables]
        # On their device, and in arrays of their own: JAX's steps reuse those of the variables.
        self._before = [(v, keras.ops.copy(v)) for v in {id(v): v for v in saved}.values()]

    def fault(self, *, counted: bool) -> Fault | None:
        """Return why the step was skipped, after restoring the values from before it; None if it was not.

        Args:
            counted: whether this rank had samples in it.
        """
        backend_module().wait_for_reports()
        skipped = self._skipped.take()
        before = {id(v): value for v, value in self._before}
        # Loss scaling lowers its scale after such a step, which cannot help once the scale is 1.
        if skipped is None or (skipped.by_scaling and _number(before[id(self._model.optimizer.dynamic_scale)]) > 1.0):
            return None
        tracker = self._model._loss_tracker  # counts the epoch; the difference to before is the step's
        total, count = (_number(v) - _number(before[id(v)]) for v in (tracker.total, tracker.count))
        for variable, value in self._before:
            variable.assign(value)
        return Fault(skipped.reduced, skipped.own if counted else None, total / count if count else float("nan"))


def _number(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))
