"""DiLoCo: ranks take many steps alone, and an outer optimizer steps by the mean of their changes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdtrain.adapter import Adapter, Need, Needs, Options
from hvdtrain.distributed.data_ranks import PartRanks
from hvdtrain.distributed.world import World
from hvdtrain.sync.periodic import Period, Periodic
from hvdtrain.sync.strategy import Strategy, check_count, describe_period
from hvdtrain.sync.synchronizer import Synchronizer


@dataclass(frozen=True)
class DiLoCo(Strategy):
    """Let ranks step alone for `every` steps; then an outer SGD with Nesterov momentum steps by their mean change.

    See Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, which takes AdamW
    as the inner optimizer, every=500, lr=0.7 and momentum=0.9. The outer step is taken after each epoch too. Its
    momentum is in checkpoints. Everything else is as in `LocalSGD`, which is DiLoCo with lr=1 and momentum=0. With
    `compression`, the outer momentum gets the mean of what ranks have sent (Thérien et al., "MuLoCo: Muon is a
    practical inner optimizer for DiLoCo", 2025).

    With `overlap`, no step waits for an exchange that is shorter than so many steps: it is in flight during these, and
    what a rank learns meanwhile is added to the result. With `fragments`, the weights are divided, and every /
    fragments steps one of the parts is exchanged, so that the link is used evenly (Douillard et al., "Streaming
    DiLoCo with overlapping communication", 2025). Either way, optimizer state stays each rank's own, and ranks hold
    equal weights only after an epoch, and where a checkpoint, a validation or a stop is due: all ranks then exchange
    everything once more. A run resumes bit for bit where these come after the same steps.

    Args:
        every: inner steps, taken alone, between outer steps.
        lr: the outer learning rate.
        momentum: the outer momentum, in [0, 1).
        fragments: for torch, the number of parts of the weights that are exchanged at different steps.
        overlap: for torch, the number of steps during which an exchange is in flight; less than every / fragments.

    Raises:
        ValueError: an option outside its range; from the Trainer, on one rank, which has nothing to average.
    """

    every: int = 100
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        check_count("DiLoCo", "every", self.every, least=1)
        check_count("DiLoCo", "fragments", self.fragments, least=1)
        check_count("DiLoCo", "overlap", self.overlap, least=0)
        if self.fragments > self.every or self.overlap >= max(1, self.every // self.fragments):
            raise ValueError(
                "DiLoCo: an exchange must end before the next one begins: overlap < every / fragments. Received: "
                f"every={self.every}, fragments={self.fragments}, overlap={self.overlap}"
            )
        given = (self.lr, self.momentum)
        numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in given)
        if not (numbers and 0.0 < self.lr < math.inf and 0.0 <= self.momentum < 1.0):
            raise ValueError(
                f"DiLoCo: lr must be > 0, and momentum in [0, 1). Received: lr={self.lr!r}, momentum={self.momentum!r}"
            )

    def describe(self, steps: int | None) -> list[str]:
        """Return a log line if `every` exceeds these steps."""
        return describe_period(self, self.every, steps)

    @property
    def needs(self) -> Needs:
        """Steps without other ranks; with fragments or overlap, exchanges of weights that are in flight meanwhile."""
        needs: tuple[Need, ...] = ("weights", "lone steps")
        if self._period.is_streaming:
            needs += ("weights in flight",)
        return Needs("sync=DiLoCo", "ranks step alone", needs)

    @property
    def _period(self) -> Period:
        return Period(self.every, lr=self.lr, momentum=self.momentum, fragments=self.fragments, overlap=self.overlap)

    def synchronizer(self, adapter: Adapter, options: Options, world: World) -> Synchronizer:
        """Return what takes outer steps every so many steps; ValueError on one rank."""
        if PartRanks(world).size == 1:
            on = "one rank" if world.grid is None else f"one replica of {world.grid}"
            raise ValueError(
                f"DiLoCo averages over ranks. Received: sync={self} on {on}. Launch with `horovodrun -np N python "
                "script.py`, or use sync=None."
            )
        return Periodic(adapter, self._period, options, world)
