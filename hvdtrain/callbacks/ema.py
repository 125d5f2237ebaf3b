"""Average a torch model's weights over its steps, and evaluate with the averages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hvdtrain import checkpoint
from hvdtrain.adapter import ShardedArray, framework_of, host_arrays
from hvdtrain.callbacks.base import Callback, Logs, RunContext
from hvdtrain.distributed import frameworks
from hvdtrain.errors import CheckpointError

_PREFIX = "average."  # of the names of arrays in checkpoints


class EMA(Callback):
    """Keep an exponential moving average of a torch model's trained weights, and use it in validation.

    Validation metrics, and so `Checkpoint(best=...)` and `EarlyStopping`, are those of the averages. Training continues
    with the weights themselves, and a checkpoint holds both. `with ema.averaged():` gives the model the averages, for
    example to export it. Buffers, such as running statistics of BatchNorm, are the model's own. Give a Keras model's
    optimizer `use_ema=True`, and `fit` a `keras.callbacks.SwapEMAWeights`.

    Args:
        decay: what an average retains in one step: average = decay * average + (1 - decay) * weights.
        every: steps between updates, each of which retains decay**every. 1 is exact, and costs one more pass over the
            weights and averages in each step.

    Raises:
        ValueError: decay is not in [0, 1), or every is less than 1.
        TypeError: from `fit`, for a Keras model.
    """

    swaps_weights = True
    takes_parts = True

    def __init__(self, decay: float = 0.999, *, every: int = 10) -> None:
        if not 0.0 <= decay < 1.0 or isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(
                f"decay must be in [0, 1), and every an int >= 1. Received: decay={decay!r}, every={every!r}"
            )
        self._decay, self._every = decay, every
        self._steps = 0  # since the last update; those that were skipped do not count
        self._averages: Any = None

    def on_fit_begin(self, trainer: RunContext) -> None:
        """Begin with the current weights; a resumed run restores its averages."""
        if framework_of(trainer.model) != "torch":
            raise TypeError(
                "EMA is for torch models. Received: a Keras model. Give its optimizer use_ema=True and "
                "ema_momentum=..., and fit a keras.callbacks.SwapEMAWeights()."
            )
        self._averages = frameworks.load("torch", "averaging").AveragedWeights(trainer.model, trainer.world.grid)
        self._steps = 0

    def on_step_end(self, trainer: RunContext, step: int) -> None:
        """Update the averages if that is due, and ranks hold equal weights."""
        self._steps += trainer.step_taken
        self._update_if_due(trainer)

    def on_epoch_end(self, trainer: RunContext, epoch: int, logs: Logs) -> None:
        """Update averages that waited for ranks to hold equal weights, as they do after an epoch."""
        self._update_if_due(trainer)

    def _update_if_due(self, trainer: RunContext) -> None:
        if self._steps >= self._every and trainer.in_sync:
            self._averages.update(1.0 - self._decay**self._steps)
            self._steps = 0

    def on_validation_begin(self, trainer: RunContext) -> None:
        """Give the model the averages."""
        self._update_if_due(trainer)
        self._averages.show()

    def on_validation_end(self, trainer: RunContext, logs: Logs) -> None:
        """Give the model its weights again."""
        self._averages.hide()

    def close(self) -> None:
        """Give the model its weights again, after an error in validation."""
        if self._averages is not None:
            self._averages.hide()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, the model of the last `fit` holds the averages: for `evaluate`, `predict` and `state_dict()`.

        Call it on every rank if you call a collective in it. Do not train in it.
        """
        if self._averages is None:
            raise ValueError("There are no averages yet. Call fit with this callback first.")
        self._averages.show()
        try:
            yield
        finally:
            self._averages.hide()

    def state(self) -> dict[str, Any]:
        """Return the averages, by the names of their parameters; where a Grid divides the model, of all parts."""
        if self._averages is None:
            return {}
        return {"steps": self._steps} | {_PREFIX + name: each for name, each in self._averages.arrays().items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self._steps = state["steps"]
        arrays = _arrays(state)
        is_divided = any(isinstance(each, ShardedArray) for each in arrays.values())
        (self._averages.load_parts if is_divided else self._averages.load)(arrays)

    @staticmethod
    def load(directory: str | os.PathLike[str], model: Any) -> None:
        """Load the averages of a checkpoint into a model, on this rank alone, for example to export it.

        Raises:
            CheckpointError: the checkpoint is missing or damaged, has no averages, or is of another model.
        """
        contents = checkpoint.scan(directory)
        names = [name for name, _ in contents.meta["callbacks"]]
        if EMA.__name__ not in names:
            raise CheckpointError(f"Checkpoint {directory} has no averages: its run had no EMA callback.")
        prefix = f"{names.index(EMA.__name__)}.{_PREFIX}"
        arrays = host_arrays(contents.arrays.get("callbacks", {}))
        own = {name.removeprefix(prefix): name for name in arrays if name.startswith(prefix)}
        averages = frameworks.load("torch", "averaging").AveragedWeights(model)
        try:
            averages.load(arrays.renamed(own))
        except ValueError as error:
            raise CheckpointError(f"Checkpoint {directory} is of another model: {error}") from error
        averages.show()


def _arrays(state: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(_PREFIX): each for name, each in state.items() if name.startswith(_PREFIX)}
