"""Gradients are reduced while backward still runs: the exchange of synchronous training."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from hvdtrain.torch.ops.compression import Compressor
from hvdtrain.torch.reduction.exchange import Applied, Exchange, Made, RankGaveUp
from hvdtrain.torch.reduction.sharded import Shards
from hvdtrain.torch.reduction.weighted_mean import FAILED


class Overlapped(Exchange):
    """Lets an optimizer that `DistributedOptimizer` returned reduce, or several that are `Together`.

    Args:
        optimizer: the optimizer.
        shards: of its state, if each rank is to get its parts of the gradients only.
    """

    can_give_up = True

    def __init__(self, optimizer: Any, shards: Shards | None = None) -> None:
        self._optimizer = optimizer
        if shards is not None:
            self.tensors = shards
            optimizer._hvd_reducer.scatter(shards)
        if hasattr(optimizer, "_hvd_reducer"):  # else several have their own
            self.compressor = optimizer._hvd_reducer.options.compression

    @property
    def compressors(self) -> list[Compressor]:
        """The compressor, or those of several optimizers."""
        several = getattr(self._optimizer, "by_name", {}).values()
        return [each._hvd_reducer.options.compression for each in several] or [self.compressor]

    def start(self) -> None:
        """Drop a step of a fit that an error has ended, and what the compressor remembers."""
        if hasattr(self._optimizer, "_hvd_reducer"):
            self._optimizer._hvd_reducer.forget()
        super().start()

    def begin(self, passes: int, *, first: bool) -> None:
        """Send a gradient after so many passes; a rank without passes adds nothing, and zeros are sent for it."""
        if passes and (first or passes != self._optimizer.backward_passes_per_step):
            self._optimizer.set_backward_passes_per_step(passes)
        if self.tensors.are_parts:  # the next step's gradients are to be freed during backward
            self._optimizer._hvd_reducer.attach()

    def finish(self, made: Made) -> Applied:
        """Wait for the mean."""
        weights = made.weights
        total = self._optimizer.synchronize(weight=weights.weight, expected=weights.expected)
        if total == FAILED:
            raise RankGaveUp
        weights.learn(total)
        return Applied(total == 0, weights.expected / total if total else 1.0)

    def give_up(self) -> None:
        """Take part without this rank's gradients."""
        self._optimizer.synchronize(weight=FAILED)

    def detach(self) -> None:
        """Remove the hooks; the next `finish` adds them again."""
        self._optimizer._hvd_reducer.detach()

    @property
    def packed(self) -> NDArray[Any] | None:
        """Flags of the small gradients that are sent in a bucket."""
        packed: NDArray[Any] | None = self._optimizer._hvd_reducer.packed
        return packed

    @packed.setter
    def packed(self, flags: NDArray[Any] | None) -> None:
        self._optimizer._hvd_reducer.packed = flags
