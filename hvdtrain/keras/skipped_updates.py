"""Steps whose update is skipped: what they must leave behind, and why they were skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.adapter import Fault
from hvdtrain.keras.backends import backend_module
from hvdtrain.keras.optimizer import distributed_part
from hvdtrain.keras.training_state import metric_variables


class StepSnapshot:
    """What a step changes before its gradient is known: running statistics, seeds, metrics, the loss scale.

    Args:
        model: compiled, its optimizer distributed; from now on it skips updates that are not finite.
        everything: whether a skipped step leaves nothing behind; else only its loss is reported.
    """

    def __init__(self, model: keras.Model, *, everything: bool) -> None:
        self._model = model
        self._everything = everything
        self._before: list[tuple[Any, Any]] = []
        self._skipped: tuple[str, str | None, bool] | None = None  # first bad path: reduced, own; by loss scaling
        part: Any = distributed_part(model.optimizer)
        part.skip_non_finite(self._note)

    def _note(self, paths: Sequence[str], own: Any, reduced: Any = None) -> None:
        """Note a skipped update; see `DistributedMixin.skip_non_finite`."""

        def first(flags: Any) -> str | None:
            return next((path for path, flag in zip(paths, np.asarray(flags), strict=True) if flag), None)

        by_scaling = reduced is None
        self._skipped = (first(own if by_scaling else reduced) or "none", first(own), by_scaling)

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

        `counted` says whether this rank had samples in it.
        """
        backend_module().wait_for_reports()
        skipped, self._skipped = self._skipped, None
        if skipped is None:
            return None
        reduced, own, by_scaling = skipped
        before = {id(v): value for v, value in self._before}
        # Loss scaling lowers its scale after such a step, which cannot help once the scale is 1.
        if by_scaling and _number(before[id(self._model.optimizer.dynamic_scale)]) > 1.0:
            return None
        tracker = self._model._loss_tracker  # counts the epoch; the difference to before is the step's
        total, count = (_number(v) - _number(before[id(v)]) for v in (tracker.total, tracker.count))
        for variable, value in self._before:
            variable.assign(value)
        return Fault(reduced, own if counted else None, total / count if count else float("nan"))


def _number(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))
