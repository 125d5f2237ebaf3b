"""The contract of an exchange: how this rank's gradients become the mean with which all ranks step.

One exchange a file: `overlapped` (with backward), `alone`, `host_mean`, `delayed`. `cut` does not
follow this contract: its steps stay open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch.nn import Parameter

from hvdtrain.adapter import Fault
from hvdtrain.distributed.world import World
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.reduction.loss_weights import LossWeights


class RankGaveUp(Exception):  # noqa: N818 - caught by whoever repeats the step
    """Another rank has given up this step: it ran out of memory, or refuses its loss."""


@dataclass(frozen=True)
class Made:
    """What this rank's backward passes have made, besides the parameters' gradients."""

    weights: LossWeights
    scale: Callable[[], float]  # of the loss scaling; a call waits for a GPU
    find_fault: Callable[[], Fault | None]  # looks for what is not finite in this rank's own gradients


@dataclass(frozen=True)
class Applied:
    """What the parameters' gradients are once they are averaged."""

    counts_nothing: bool = False  # no sample counted on any rank: with SyncBatchNorm, gradients are zeros
    factor: float = 1.0  # corrects the scale of a loss of this step, as it has corrected the gradients'
    # Why the gradients may not be finite, if they are of an earlier step; None: look at this step.
    fault: Fault | None = None
    must_undo: bool = False  # what this rank has just computed is not finite, and a later step refuses it


class Exchange(Protocol):
    """Replaces the gradients of an optimizer's parameters by their mean over ranks."""

    can_give_up: bool  # other ranks wait in `finish` of the same step, and learn there that this rank gives up

    def start(self) -> None:
        """Begin a fit, perhaps with other ranks than before; a collective."""

    def begin(self, passes: int, *, first: bool) -> None:
        """Begin a step of so many backward passes on this rank; `first` after the metrics were reset."""

    def finish(self, made: Made) -> Applied:
        """Average the gradients; a collective. RankGaveUp where a rank has called `give_up`."""

    def give_up(self) -> None:
        """Take part in `finish` without this rank's gradients; no rank takes the step."""

    def flush(self, made: Made) -> Applied | None:
        """Put the gradients that are still in flight after the last step; None if there are none."""

    def detach(self) -> None:
        """Remove what is attached to backward passes, until the next step."""

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return what `State.arrays` and `State.meta` hold of the exchange."""

    def load(self, arrays: Mapping[str, NDArray[Any]], meta: dict[str, Any]) -> None:
        """Restore what `state` returned, or forget it if a checkpoint has nothing of this exchange."""

    @property
    def packed(self) -> NDArray[Any] | None:
        """Which gradients travel together, equal on all ranks; None if there is no choice."""

    @packed.setter
    def packed(self, flags: NDArray[Any] | None) -> None: ...


class Immediate:
    """Defaults: nothing is attached to backward passes, and nothing outlives a step. Others override."""

    can_give_up = False

    def start(self) -> None:
        """Do nothing."""

    def begin(self, passes: int, *, first: bool) -> None:
        """Do nothing."""

    def give_up(self) -> None:
        """Do nothing: no rank waits."""

    def flush(self, made: Made) -> Applied | None:
        """Return None."""
        return None

    def detach(self) -> None:
        """Do nothing."""

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return nothing."""
        return {}, {}

    def load(self, arrays: Mapping[str, NDArray[Any]], meta: dict[str, Any]) -> None:
        """Do nothing."""

    @property
    def packed(self) -> NDArray[Any] | None:
        """None."""
        return None

    @packed.setter
    def packed(self, flags: NDArray[Any] | None) -> None:
        """Forget what another exchange has packed."""


def parameters_of(optimizer: Any) -> list[Parameter]:
    """Return an optimizer's parameters, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@dataclass(frozen=True)
class DenseOnly:
    """Raises for sparse gradients, where a `feature` averages dense ones only."""

    feature: str
    instead: str
    names: dict[Parameter, str]
    world: World

    def check(self, parameters: list[Parameter]) -> None:
        """Raise HvdTrainError if a gradient is sparse."""
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise HvdTrainError(
                    f"{self.feature} averages dense gradients. Received: a sparse gradient of "
                    f"{self.names[parameter]} on rank {self.world.rank}. Use Embedding(sparse=False), or "
                    f"{self.instead}."
                )
