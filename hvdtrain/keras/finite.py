"""Are the numbers still numbers? And if not: which, and what a step that is not taken must leave behind."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.adapter import Fault, Options
from hvdtrain.keras.backends import backend_module
from hvdtrain.keras.optimizer import distributed_part
from hvdtrain.keras.skipped_updates import Watch


def guard_for(model: keras.Model, options: Options) -> Guard | None:
    """Let the model's optimizer look at its gradients, if `nan_policy` asks for it; to be called before any step.

    Raises:
        ValueError: the optimizer does something that a step which is not taken cannot leave out.
    """
    if options.nan_policy is None:
        return None
    part = distributed_part(model.optimizer)
    received = f"Received: nan_policy={options.nan_policy!r} with {type(part).__name__}"
    if part.use_ema:  # type: ignore[union-attr]
        raise ValueError(
            "nan_policy and an optimizer's moving averages do not go together. "
            f"{received}(use_ema=True). Leave one out."
        )
    scaled = part is not model.optimizer
    if scaled and options.accumulate > 1:
        raise ValueError(
            f"nan_policy, loss scaling and accumulate do not go together. {received} in a LossScaleOptimizer and "
            f'accumulate={options.accumulate}. Use precision="bf16", or leave one out.'
        )
    return Guard(model, part.watch(), everything=options.nan_policy != "raise")  # type: ignore[union-attr]


class Guard:
    """What a step changes before its gradient is known: running statistics, seeds, what metrics count, the loss scale.

    Args:
        model: compiled, its optimizer distributed.
        watch: hears of updates that were not made.
        everything: whether a step that is not taken leaves nothing behind; else it only tells its loss.
    """

    def __init__(self, model: keras.Model, watch: Watch, *, everything: bool) -> None:
        self._model = model
        self._watch = watch
        self._everything = everything
        self._before: list[tuple[Any, Any]] = []

    def remember(self) -> None:
        """Note how things are before the step."""
        model, optimizer = self._model, self._model.optimizer
        kept = list(model._loss_tracker.variables)
        if optimizer is not distributed_part(optimizer):
            kept += [optimizer.step_counter, optimizer.dynamic_scale]
        if self._everything:
            kept += [v for metric in model.metrics for v in metric.variables] + model.non_trainable_variables
        # On their device, and in arrays of their own: JAX's steps take over those of the variables.
        self._before = [(v, keras.ops.copy(v)) for v in {id(v): v for v in kept}.values()]

    def fault(self, *, counted: bool) -> Fault | None:
        """Return why the step was not taken, after making things as they were; None where it was.

        Args:
            counted: whether this rank had samples in it.
        """
        backend_module().wait_until_told()
        told = self._watch.take()
        before = {id(v): value for v, value in self._before}
        # Loss scaling lowers its scale after such a step, which only cannot help once that is 1.
        if told is None or (told.by_scaling and _number(before[id(self._model.optimizer.dynamic_scale)]) > 1.0):
            return None
        tracker = self._model._loss_tracker  # of the epoch: what it has more than before is the step's
        total, count = (_number(v) - _number(before[id(v)]) for v in (tracker.total, tracker.count))
        for variable, value in self._before:
            variable.assign(value)
        return Fault(told.reduced, told.own if counted else None, total / count if count else float("nan"))


def _number(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))
