"""Ranks step alone, and every so many steps average their weights; local SGD and DiLoCo are this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdtrain.adapter import Adapter, Fault, Options, State
from hvdtrain.data.sources import Batch
from hvdtrain.distributed.world import World
from hvdtrain.sync.strategy import WrappedAdapter

_VELOCITY = "sync.velocity."  # of names in checkpoints


@dataclass(frozen=True)
class Period:
    """When ranks synchronize, and what they make of the mean of their changes.

    With anchor a, equal on all ranks, and this rank's weights x, the mean change is d = mean(x - a). Then the velocity
    v becomes momentum * v + d, and the weights a + lr * (d + momentum * v): Nesterov's momentum in torch.optim.SGD's
    form, for the gradient -d.
    """

    every: int  # steps
    after_steps: int = 0  # these first steps are synchronous
    lr: float = 1.0
    momentum: float = 0.0


class PeriodicAdapter(WrappedAdapter):
    """Takes steps alone, and synchronizes weights and optimizer state after every so many, and after each epoch.

    State that has a value for each weight, such as momentum and Adam's averages, is averaged with the weights (Yu, Jin
    and Yang, "On the Linear Speedup Analysis of Communication Efficient Momentum SGD", 2019). So all ranks are equal
    after a synchronization, and a checkpoint is as large as without a strategy.
    """

    def __init__(self, adapter: Adapter, period: Period, options: Options, world: World) -> None:
        super().__init__(adapter)
        self._period, self._compression, self._world = period, options.compression, world
        self._steps = 0  # of the run
        self._alone = 0  # steps since ranks were equal
        self._faulty: Fault | None = None  # this rank's first since then
        self._fault_at = 0
        # Changes are needed where they are compressed, which weights would not survive, or weighed.
        self._has_anchor = options.compression != "none" or (period.lr, period.momentum) != (1.0, 0.0)
        self._anchor: list[Any] | None = None
        self._velocity: list[Any] = []
        self._checks = options.nan_policy is not None

    @property
    def in_sync(self) -> bool:
        """Whether ranks hold equal weights and optimizer state."""
        return self._alone == 0

    def start(self) -> None:
        """Broadcast the root's weights, optimizer state and velocity."""
        super().start()
        if self._world.size > 1:
            mine = {"steps": self._steps, "velocity": [len(each) for each in self._velocity]}
            root = self._world.broadcast_object(mine, name="sync")
            self._steps = root["steps"]
            like = self._adapter.replica().weights() if root["velocity"] else []
            self._velocity = [self._broadcast(index, each) for index, each in enumerate(like)]
        self._alone, self._faulty, self._anchor = 0, None, None

    def _broadcast(self, index: int, like: Any) -> Any:
        replica = self._adapter.replica()
        mine = replica.to_host(self._velocity[index] if self._world.is_root else like)
        return replica.from_host(self._world.broadcast(mine, name="sync.velocity"), like)

    def train_step(self, batches: Sequence[Batch]) -> None:
        """Take a step alone, and synchronize if that is due; the first `after_steps` are synchronous."""
        period = self._period
        if self._steps < period.after_steps or self._world.size == 1:
            self._adapter.reduce_over("all")
            super().train_step(batches)
            self._steps += 1
            return
        if self._anchor is None and self._has_anchor:
            self._anchor = self._adapter.replica().weights()
        self._adapter.reduce_over("none")
        self._adapter.train_step(batches)
        self.fault = None
        self._steps += 1
        self._alone += 1
        if self._adapter.fault is not None and self._faulty is None:
            self._faulty, self._fault_at = replace(self._adapter.fault, batches=batches), self._steps
        if (self._steps - period.after_steps) % period.every == 0:
            self._synchronize()

    def settle(self) -> None:
        """Synchronize weights after an epoch too; then statistics, as always."""
        if self._alone:
            self._synchronize()
        super().settle()

    def _synchronize(self) -> None:
        replica = self._adapter.replica()
        replica.agree()
        changes = replica.weights()
        if self._anchor is not None:
            for change, anchor in zip(changes, self._anchor, strict=True):
                change -= anchor
        # A second moment is too small for float16.
        moments_as = "none" if self._compression == "none" else "bf16"
        wait_changes = replica.mean(changes, name="sync.weights", compression=self._compression)
        wait_moments = replica.mean(replica.moments(), name="sync.moments", compression=moments_as)
        replica.set_weights(self._advanced(wait_changes()))
        replica.set_moments(wait_moments())
        self._alone = 0
        self._agree_on_faults()

    def _advanced(self, changes: list[Any]) -> list[Any]:
        """Return the new weights, and make them the anchor."""
        if self._anchor is None:
            return changes
        lr, momentum = self._period.lr, self._period.momentum
        if momentum and not self._velocity:
            self._velocity = [0.0 * change for change in changes]
        for index, (anchor, change) in enumerate(zip(self._anchor, changes, strict=True)):
            if momentum:
                velocity = self._velocity[index]
                velocity *= momentum
                velocity += change
                change += momentum * velocity
            if lr != 1.0:
                change *= lr
            anchor += change
        return self._anchor

    def _agree_on_faults(self) -> None:
        """Report a step that a rank did not take, now that all ranks can."""
        if not self._checks:
            return
        mine = self._faulty is not None
        ago = self._steps - self._fault_at if mine else 0
        found, largest = self._world.allreduce(np.array([mine, ago], np.int64), "max", name="sync.faults").tolist()
        if found:
            fault = self._faulty or Fault("another rank's", None, float("nan"))
            self.fault = replace(fault, steps_ago=largest)
        self._faulty = None

    def state(self) -> State:
        """Return the adapter's state, the velocity, and how many steps are done."""
        state = self._adapter.state()
        to_host = self._adapter.replica().to_host
        velocity = {f"{_VELOCITY}{index}": to_host(each) for index, each in enumerate(self._velocity)}
        meta = {**state.meta, "sync": {"steps": self._steps}}
        return replace(state, arrays=state.arrays | velocity, meta=meta)

    def load_state(self, state: State) -> None:
        """Restore it; a checkpoint of a run without a strategy has no velocity."""
        velocity = {name: array for name, array in state.arrays.items() if name.startswith(_VELOCITY)}
        meta = dict(state.meta)
        own = meta.pop("sync", {"steps": 0})
        self._adapter.load_state(
            replace(state, arrays={n: a for n, a in state.arrays.items() if n not in velocity}, meta=meta)
        )
        self._steps, self._alone, self._anchor, self._velocity = own["steps"], 0, None, []
        if velocity and self._period.momentum:
            replica = self._adapter.replica()
            like = replica.weights()
            self._velocity = [replica.from_host(velocity[f"{_VELOCITY}{i}"], each) for i, each in enumerate(like)]
