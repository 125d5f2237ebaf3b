"""Local SGD: ranks step alone, and average weights every so many steps."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.adapter import Adapter, Need, Needs, Options, Ranks
from hvdtrain.distributed.world import World
from hvdtrain.sync.periodic import Period, Periodic
from hvdtrain.sync.strategy import Strategy, check_count, describe_period
from hvdtrain.sync.synchronizer import Synchronizer


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Let ranks step alone, and average their weights every so many steps, and after each epoch.

    Ranks send their weights once in `every` steps, in place of a gradient in each (Stich, "Local SGD Converges Fast and
    Communicates Little", 2019). With `after_steps` the first steps are synchronous (post-local SGD: Lin et al., "Don't
    Use Large Mini-Batches, Use Local SGD", 2020), while weights change most. With every=1 and plain SGD it equals
    synchronous training.

    Between synchronizations each rank clips its own gradient. Momentum and Adam's averages are averaged with the
    weights: they are sent too, so SGD with momentum sends twice as much as plain SGD, and Adam three times. The
    Trainer's `compression` is of the changes of the weights since the last synchronization; averages are then sent in
    bfloat16. What "int8", "topk:0.01" and "powersgd:4" leave out of a change, a rank adds to its next one (Basu et al.,
    "Qsparse-local-SGD", 2019).

    With within="host", in PyTorch, the ranks of a host are synchronous: they step with the mean of their gradients, and
    weights are averaged between hosts every so many steps (hierarchical local SGD, in the paper on post-local SGD).

    Args:
        every: optimizer steps between synchronizations, counted over the run.
        after_steps: number of synchronous steps at the beginning.
        within: "host", or None for ranks that step alone.

    Raises:
        ValueError: an option outside its range.
    """

    every: int
    after_steps: int = 0
    within: str | None = None

    def __post_init__(self) -> None:
        check_count("LocalSGD", "every", self.every, least=1)
        check_count("LocalSGD", "after_steps", self.after_steps, least=0)
        if self.within not in (None, "host"):
            raise ValueError(f'LocalSGD: within must be None or "host". Received: within={self.within!r}')

    def describe(self, steps: int | None) -> list[str]:
        """Return a log line if `every` exceeds these steps."""
        return describe_period(self, self.every, steps)

    @property
    def needs(self) -> Needs:
        """Steps without other ranks, or with those of the host."""
        needs: tuple[Need, ...] = ("weights", "lone steps", "host steps") if self.within else ("weights", "lone steps")
        return Needs("sync=LocalSGD", "ranks step alone", needs)

    def synchronizer(self, adapter: Adapter, options: Options, world: World) -> Synchronizer:
        """Return what averages weights every so many steps."""
        within: Ranks = "host" if self.within else "none"
        return Periodic(adapter, Period(self.every, self.after_steps, within), options, world)
