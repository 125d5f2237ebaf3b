"""The contract between the Trainer and a framework, on one screen.

The Trainer decides what happens and when; an adapter knows how its framework does it. An adapter reduces over ranks
inside its own optimizer, asks World for the size, and never asks which rank it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.sources import Batch
from hvdtrain.distributed import frameworks
from hvdtrain.distributed.world import World

Reduce = Callable[[NDArray[np.float64]], NDArray[np.float64]]


@dataclass(frozen=True)
class Options:
    """How to train, in words that both frameworks share; see `Trainer` for each."""

    accumulate: int = 1
    clip_norm: float | None = None
    precision: str = "fp32"
    compression: str = "none"
    nan_policy: str | None = None


@dataclass
class State:
    """All that training changes on all ranks alike: arrays by name, and whatever JSON can hold.

    Attributes:
        arrays: names begin with "model." or "optimizer.".
        meta: the optimizer's settings, the precision scaler.
        unsettled: names of those that each rank changes on its own between two calls of `Adapter.settle`.
        trained: names of those that gradients change.
    """

    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    unsettled: frozenset[str] = frozenset()
    trained: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Fault:
    """Why a step was not taken: a reduced gradient, equal on all ranks, is not finite.

    Attributes:
        reduced: name of the first such parameter.
        own: name of the first whose gradient on this rank alone is not finite; None where all are.
        loss: this rank's, the mean over its batches.
    """

    reduced: str
    own: str | None
    loss: float


class Adapter(Protocol):
    """What a framework does for the Trainer."""

    learning_rates: list[float]  # one a parameter group; assigning changes the optimizer's
    fault: Fault | None  # of the last train_step; only where options.nan_policy is given, then on all ranks or none
    rank_state: dict[str, NDArray[Any]]  # what this rank alone holds, named as in `rank_state`; assigning takes it on

    def start(self) -> None:
        """Give every rank the root's weights and optimizer state, and change nothing else."""
        ...

    def train_step(self, batches: Sequence[Batch]) -> None:
        """Take one optimizer step over `batches` (more than one under accumulation), reduced over all ranks.

        The step equals one process's over all samples of all ranks: each sample weighs the same. A batch with
        local_count 0 adds nothing, but the rank takes part in the reduction.
        """
        ...

    def eval_step(self, batch: Batch) -> None:
        """Add a batch to the metrics, without training; a batch with local_count 0 adds nothing."""
        ...

    def predict_step(self, inputs: Any) -> NDArray[Any]:
        """Return the model's outputs for a batch: (local_batch, ...)."""
        ...

    def metrics(self, reduce: Reduce, *, keep: bool = False) -> dict[str, float]:
        """Return the metrics since they were started, exact over all ranks, and start them anew.

        Args:
            reduce: sums a float64 vector over ranks; to be called exactly once, with all that the metrics need.
            keep: go on with them instead: an epoch is under way.
        """
        ...

    def settle(self) -> None:
        """Make equal on all ranks what no gradient trains, such as running means; called after each epoch."""
        ...

    def state(self) -> State:
        """Return weights, optimizer state and precision scaler, as arrays that the next step may change."""
        ...

    def load_state(self, state: State) -> None:
        """Take on a state that `state` returned. Raises ValueError naming the first tensor that does not fit."""
        ...


def adapter_for(
    model: Any, *, optimizer: Any, loss: Any, metrics: Sequence[Any], options: Options, world: World
) -> Adapter:
    """Return the adapter of the framework that `model` belongs to.

    Raises:
        TypeError: the model is neither a keras.Model nor a torch.nn.Module.
    """
    adapter: Adapter = frameworks.load(framework_of(model), "adapter").make_adapter(
        model, optimizer=optimizer, loss=loss, metrics=metrics, options=options, world=world
    )
    return adapter


def framework_of(model: Any) -> str:
    """Return "keras" or "torch" for a model, without importing either.

    Raises:
        TypeError: the model is neither.
    """
    homes = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    # Keras first: with its torch backend a Keras model is a torch.nn.Module too.
    for framework in ("keras", "torch"):
        if framework in homes:
            return framework
    raise TypeError(f"model must be a torch.nn.Module or a keras.Model. Received: {type(model).__name__}")
