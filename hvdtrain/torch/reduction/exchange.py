"""The contract of an exchange: how this rank's gradients become the mean with which all ranks step.

One exchange a file: `overlapped` (with backward), `alone`, `host_mean`, `delayed`. `cut` does not
follow this contract: its steps stay open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch.nn import Parameter

from hvdtrain.adapter import Fault
from hvdtrain.distributed.world import World
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.ops.compression import Compressor, NoneCompressor
from hvdtrain.torch.reduction.loss_weights import LossWeights
from hvdtrain.torch.reduction.tensors import Whole

_PACKED = "max.packed"


class RankGaveUp(Exception):  # noqa: N818 - caught by whoever repeats the step
    """Another rank has given up this step: it ran out of memory, or refuses its loss."""


@dataclass(frozen=True)
class Made:
    """The results of this rank's backward passes, besides the parameters' gradients."""

    weights: LossWeights
    scale: Callable[[], float]  # of the loss scaling; a call waits for a GPU
    find_fault: Callable[[], Fault | None]  # looks for what is not finite in this rank's own gradients


@dataclass(frozen=True)
class Applied:
    """Facts about the parameters' gradients after they were averaged."""

    counts_nothing: bool = False  # no sample counted on any rank: with SyncBatchNorm, gradients are zeros
    factor: float = 1.0  # corrects the scale of a loss of this step, as it has corrected the gradients'
    # Why the gradients may not be finite, if they are of an earlier step; None: look at this step.
    fault: Fault | None = None
    is_refused: bool = False  # all ranks refuse to step with them, because they are not finite
    must_undo: bool = False  # what this rank has just computed is not finite, and a later step refuses it


class Exchange:
    """Replaces the gradients of an optimizer's parameters by their mean over ranks.

    By default nothing is attached to backward passes, and nothing outlives a step.
    """

    tensors: Whole = Whole()  # with which this rank's optimizer steps after `finish`
    can_give_up = False  # True if ranks wait in `finish` of the same step, and learn there that this rank gives up
    compressor: Compressor = NoneCompressor()  # bound to the parameters

    def finish(self, made: Made) -> Applied:
        """Average the gradients; a collective. RankGaveUp where a rank has called `give_up`."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin a fit, perhaps with other ranks than before; a collective."""
        self.compressor.reset()

    def scale_loss(self, scale: Callable[[], float]) -> None:
        """Tell compressors with a memory by what the next gradients are multiplied; `scale` waits for a GPU."""
        for compressor in self.compressors:
            if compressor.has_memory:
                compressor.loss_scale = scale()

    def begin(self, passes: int, *, first: bool) -> None:
        """Begin a step of so many backward passes on this rank; `first` after the metrics were reset."""

    def give_up(self) -> None:
        """Take part in `finish` without this rank's gradients; no rank takes the step."""

    def flush(self, made: Made) -> Applied | None:
        """Put the gradients that are still in flight after the last step; return None if there are none."""
        return None

    def detach(self) -> None:
        """Remove what is attached to backward passes, until the next step."""

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the part of `State.arrays` and of `State.meta` that is the exchange's."""
        return {}, {}

    def load(self, arrays: Mapping[str, NDArray[Any]], meta: dict[str, Any]) -> None:
        """Restore what `state` returned, or forget it if a checkpoint has nothing of this exchange."""

    @property
    def compressors(self) -> list[Compressor]:
        """The compressor, or those of several optimizers."""
        return [self.compressor]

    @property
    def rank_state(self) -> dict[str, NDArray[Any]]:
        """State of this rank for later steps: the gradients that are sent together, and the compressor's memory."""
        packed = {} if self.packed is None else {_PACKED: self.packed}
        return packed | self.compressor.state()

    @rank_state.setter
    def rank_state(self, held: Mapping[str, NDArray[Any]]) -> None:
        self._set_rank_state(held)

    def _set_rank_state(self, held: Mapping[str, NDArray[Any]]) -> None:
        if _PACKED in held:
            self.packed = held[_PACKED]
        self.compressor.load(held)

    @property
    def packed(self) -> NDArray[Any] | None:
        """Flags of the gradients that are sent together, equal on all ranks; None if there is no choice."""
        return None

    @packed.setter
    def packed(self, flags: NDArray[Any] | None) -> None: ...


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
