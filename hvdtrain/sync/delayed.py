"""Delayed synchronization: the gradient of the step before is applied while this step computes its own."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.adapter import Adapter, Needs, Options
from hvdtrain.distributed.world import World
from hvdtrain.sync.strategy import Strategy
from hvdtrain.sync.synchronizer import Synchronizer


@dataclass(frozen=True)
class Delayed(Strategy):
    """Apply each gradient one step late, so that its reduction takes place while the next step computes.

    A step takes the longer one of computation and reduction, not their sum. With gradient g of weights x, a step is
    x[t+1] = x[t] - lr * mean(g[t-1]); the first step changes nothing, and the last gradient is applied when `fit` ends.
    See Zinkevich et al., "Slow Learners are Fast", 2009, and Li et al., "Pipe-SGD", 2018, who use a delay of one too.

    All ranks apply the same mean, so they hold equal weights after every step: checkpoints, validation and stops happen
    as in synchronous training. The gradient in flight is in checkpoints, and a run resumes bit for bit. One process
    delays its gradients too, and N ranks train the weights that it would train. A delayed gradient can need a smaller
    learning rate, or less momentum.

    Gradients are sent dense. torch refuses sparse gradients; it sends a parameter without a gradient as zeros. With
    `nan_policy`, ranks learn of a non-finite gradient one step later; "skip" leaves that gradient out. Keras refuses
    `nan_policy`, loss scaling and several optimizers.
    """

    @property
    def needs(self) -> Needs:
        """Gradients that are applied one step late."""
        return Needs("sync=Delayed", "no step waits for other ranks", ("weights", "delay"))

    def synchronizer(self, adapter: Adapter, options: Options, world: World) -> Synchronizer:
        """Return the synchronizer of every step: the adapter delays by itself."""
        found = Synchronizer(adapter, world)
        adapter.delay(lambda: found.between_exchanges())
        return found
