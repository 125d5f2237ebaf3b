"""Local SGD: ranks step alone, and average weights every so many steps."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.adapter import Adapter, Options
from hvdtrain.distributed.world import World
from hvdtrain.sync.periodic import Period, PeriodicAdapter
from hvdtrain.sync.strategy import Strategy, check_count


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Let ranks step alone, and average their weights every so many steps, and after each epoch.

    Ranks send their weights once in `every` steps, in place of a gradient in each (Stich, "Local SGD Converges Fast and
    Communicates Little", 2019). With `after_steps` the first steps are synchronous (post-local SGD: Lin et al., "Don't
    Use Large Mini-Batches, Use Local SGD", 2020), while weights change most. With every=1 and plain SGD it equals
    synchronous training.

    Between synchronizations each rank clips its own gradient. Momentum and Adam's averages are averaged with the
    weights: they are sent too, so SGD with momentum sends twice as much as plain SGD, and Adam three times. The
    Trainer's `compression` sends the changes of the weights in half precision, and the averages in bfloat16.

    Args:
        every: optimizer steps between synchronizations, counted over the run.
        after_steps: number of synchronous steps at the beginning.

    Raises:
        ValueError: an option outside its range.
    """

    every: int
    after_steps: int = 0

    def __post_init__(self) -> None:
        check_count("LocalSGD", "every", self.every, least=1)
        check_count("LocalSGD", "after_steps", self.after_steps, least=0)

    def wrap(self, adapter: Adapter, options: Options, world: World) -> Adapter:
        """Return an adapter that takes its steps so."""
        return PeriodicAdapter(adapter, Period(self.every, self.after_steps), options, world)
