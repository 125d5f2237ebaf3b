"""Ranks step alone, and average their weights every so many steps: the base of local SGD and DiLoCo."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapter import Adapter, Fault, Options, Ranks, State, host_arrays
from hvdtrain.data.sources import Batch
from hvdtrain.distributed.compression import PowerSGD, parse
from hvdtrain.distributed.recorder import recorder
from hvdtrain.distributed.world import World
from hvdtrain.errors import HvdTrainError
from hvdtrain.sync import part_arrays
from hvdtrain.sync.outer import Outer
from hvdtrain.sync.synchronizer import Synchronizer

log = logging.getLogger("hvdtrain")
_VELOCITY = "sync.velocity."  # of names in checkpoints


@dataclass(frozen=True)
class Period:
    """The steps at which ranks synchronize parts of the weights, and the way in which the mean change is applied."""

    every: int  # steps
    after_steps: int = 0  # these first steps are synchronous
    within: Ranks = "none"  # between synchronizations ranks step together with these
    lr: float = 1.0
    momentum: float = 0.0
    fragments: int = 1  # parts of the weights, each synchronized `every` steps, in turns
    overlap: int = 0  # steps during which an exchange is in flight

    @property
    def is_streaming(self) -> bool:
        """True if exchanges leave ranks unequal, because parts are exchanged after different steps, or late."""
        return self.fragments > 1 or self.overlap > 0


class Periodic(Synchronizer):
    """Lets ranks step alone, and synchronizes weights and optimizer state every so many steps, and after each epoch.

    State that has a value for each weight, such as momentum and Adam's averages, is averaged with the weights (Yu, Jin
    and Yang, "On the Linear Speedup Analysis of Communication Efficient Momentum SGD", 2019). So all ranks are equal
    after a synchronization, and a checkpoint is as large as without a strategy.

    A streaming period synchronizes one fragment of the weights after another, during steps, and leaves optimizer
    state alone. All ranks become equal only after an epoch, and after the step that follows a `request_sync`.
    """

    def __init__(self, adapter: Adapter, period: Period, options: Options, world: World) -> None:
        super().__init__(adapter, world)
        self._period, self._compression = period, options.compression
        self._fault: Fault | None = None  # of the last step, or of which ranks have learned after it
        self._checks = options.nan_policy is not None
        self._steps = 0  # of the run
        self._alone = 0  # steps since ranks were equal
        self._is_requested = False
        self._faulty: Fault | None = None  # this rank's first since then
        self._fault_at = 0
        self._refused = 0  # this rank's steps in a row that it did not take, up to the last one
        self._is_loaded = False  # True if no step was taken since `load_state`: a fit then continues that run
        self._is_together = True  # the current step is synchronous
        self._velocities: dict[str, NDArray[Any]] = {}  # of this part, until outers are made for its weights
        self._loaded: dict[str, NDArray[Any]] | None = None  # those of all parts, from `load_state` until `start`
        self._outers: list[Outer] = []
        self._identities: list[list[int]] = []  # of the weights that they synchronize
        recorder.exchanges = recorder.exchanges or 0
        scheme = parse(options.compression)
        if isinstance(scheme, PowerSGD) and scheme.after_steps and world.size > 1:
            adapter.notes.append(
                f"changes of weights are sent as they are in the first {scheme.after_steps} exchanges: "
                f"{scheme.name} counts these, not steps"
            )

    @property
    def in_sync(self) -> bool:
        """True if ranks hold equal weights and optimizer state."""
        return self._alone == 0

    @property
    def step_taken(self) -> bool:
        """False if a step was left out; of a step that ranks took alone, False where they learn of such a step.

        What loss scaling skips on one rank alone counts: other ranks may have taken it.
        """
        is_alone = self._world.size > 1 and self._steps > self._period.after_steps
        return self._fault is None and (is_alone or self.adapter.step_taken)

    @property
    def in_flight(self) -> bool:
        """True if an exchange of weights is in flight."""
        return any(outer.in_flight for outer in self._outers)

    def request_sync(self) -> None:
        """Synchronize everything after the next step if that never happens by itself."""
        self._is_requested = self._period.is_streaming

    def start(self) -> None:
        """Broadcast the root's weights, optimizer state and velocity. Count steps from 0, unless a run continues."""
        for outer in self._outers:
            outer.drop()
        if not self._is_loaded:
            self._steps = 0
        self._alone, self._is_requested, self._faulty, self._refused = 0, False, None, 0
        super().start()
        if self._world.size == 1:
            return
        mine, loaded, self._loaded = self._host_velocities(), self._loaded, None
        sent = mine if self._world.grid is None else loaded
        described = None if sent is None else [[name, each.shape, each.dtype.name] for name, each in sent.items()]
        self._steps, described = self._world.broadcast_object([self._steps, described], name="sync")
        # Which weights are trained may still change in on_epoch_begin, so outers take it with the first step.
        # Where a Grid's root has loaded none, each part keeps its own.
        self._velocities = mine if described is None else part_arrays.spread(sent or {}, described, world=self._world)
        self._outers, self._identities = [], []

    def _host_velocities(self) -> dict[str, NDArray[Any]]:
        """Return the velocities by name; none where no outer step was taken."""
        held = {
            f"{_VELOCITY}{number}.{index}": outer.access.to_host(each)
            for number, outer in enumerate(self._outers)
            for index, each in enumerate(outer.velocity)
        }
        return held or self._velocities

    def _make_outers(self) -> list[Outer]:
        """Return the outer optimizer of each fragment: new ones if other weights are trained than before."""
        period = self._period
        parts = self.adapter.weight_access().parts(period.fragments)
        identities = [part.identities() for part in parts]
        if identities != self._identities:
            if self._alone:
                raise HvdTrainError(
                    "Weights were frozen, or are trained again, between two synchronizations of sync=..., where ranks "
                    "hold different values of them. Do it in on_epoch_begin, or where trainer.in_sync is True. "
                    f"Received: other trained weights after step {self._steps} on rank {self._world.rank}"
                )
            # Changes are needed where they are compressed, which weights would not survive, or weighed, or overlap.
            keeps = self._compression != "none" or (period.lr, period.momentum) != (1.0, 0.0) or period.is_streaming
            how = {"lr": period.lr, "momentum": period.momentum}
            self._outers = [Outer(part, **how, keeps_anchor=keeps) for part in parts]
            self._identities = identities
            self._restore_velocities()
        return self._outers

    def _restore_velocities(self) -> None:
        """Give new outers a checkpoint's velocities, unless other weights were trained there: then they begin at 0."""
        held, self._velocities = self._velocities, {}
        if not held:
            return
        found = []
        for number, outer in enumerate(self._outers):
            pairs = [(held.get(f"{_VELOCITY}{number}.{i}"), each) for i, each in enumerate(outer.access.weights())]
            if any(saved is None or saved.shape != tuple(like.shape) for saved, like in pairs):
                return
            found.append([outer.access.from_host(saved, like) for saved, like in pairs if saved is not None])
        for outer, velocity in zip(self._outers, found, strict=True):
            outer.velocity = velocity

    def before_step(self) -> None:
        """Let the rank step alone, or with its host; the first `after_steps` steps are synchronous."""
        self._is_loaded, self._loaded = False, None
        self._is_together = self._steps < self._period.after_steps or self._world.size == 1
        if not self._is_together and not self._alone:
            for outer in self._make_outers():
                outer.begin()
        self.adapter.reduce_over("all" if self._is_together else self._period.within)

    def after_step(self, batches: Sequence[Batch]) -> Fault | None:
        """Synchronize what is due."""
        period, fault = self._period, self.adapter.fault
        self._steps += 1
        if self._is_together:
            self._fault = fault
            return fault
        self._fault = None
        self._alone += 1
        self._refused = 0 if fault is None else self._refused + 1
        if fault is not None and self._faulty is None:
            self._faulty, self._fault_at = replace(fault, batches=batches), self._steps
        done = self._steps - period.after_steps
        if self._is_requested or (done % period.every == 0 and not period.is_streaming):
            self._synchronize()
        elif period.is_streaming:
            self._stream(done)
        return self._fault

    def _stream(self, done: int) -> None:
        """End the exchange that is due to end after this step, and start the one that is due to start."""
        period = self._period
        for index, outer in enumerate(self._outers):
            if outer.in_flight and done >= outer.ends_after_step:
                outer.finish()
                recorder.exchanged()
            if done % period.every == (index + 1) * period.every // period.fragments % period.every:
                outer.start(name=f"sync.{index}", compression=self._compression, keep=True)
                outer.ends_after_step = done + period.overlap
                if not period.overlap:
                    outer.finish()
                    recorder.exchanged()

    def make_equal(self) -> Fault | None:
        """Synchronize weights after an epoch too; then statistics, as always."""
        if self._alone:
            self._synchronize()
        super().make_equal()
        return self._fault

    def _synchronize(self) -> None:
        """Make all weights and optimizer state equal on all ranks."""
        access, outers = self.adapter.weight_access(), self._make_outers()
        access.agree()
        for outer in outers:
            outer.finish()
        for index, outer in enumerate(outers):
            outer.start(name=f"sync.{index}", compression=self._compression)
        # A second moment is too small for float16.
        moments_as = "none" if self._compression == "none" else "bf16"
        moments = access.mean(access.moments(), name="sync.moments", compression=moments_as)
        for outer in outers:
            outer.finish()
        access.set_moments(moments())
        self._alone, self._is_requested = 0, False
        recorder.exchanged()
        self._agree_on_faults()

    def _agree_on_faults(self) -> None:
        """Report a step that a rank did not take, now that all ranks can."""
        if not self._checks:
            return
        mine = self._faulty is not None
        ago = self._steps - self._fault_at if mine else 0
        numbers = np.array([mine, ago, self._refused], np.int64)
        found, ago, in_a_row = self._world.allreduce(numbers, "max", name="sync.faults").tolist()
        if found:
            fault = self._faulty or Fault(None, None, float("nan"))
            self._fault = replace(fault, steps_ago=ago, in_a_row=max(1, in_a_row), is_late=True)
        self._faulty = None

    def state(self) -> State:
        """Return the adapter's state, the velocities, and how many steps are done."""
        state = super().state()
        meta = {**state.meta, "sync": {"steps": self._steps, "fragments": self._period.fragments, "grid": self._grid}}
        if self._grid is not None:
            of_parts = part_arrays.of_all_parts(self._host_velocities(), world=self._world)
            return replace(state, sharded=state.sharded | of_parts, meta=meta)
        return replace(state, arrays=state.arrays | self._host_velocities(), meta=meta)

    @property
    def _grid(self) -> str | None:
        return None if self._world.grid is None else str(self._world.grid)

    def load_state(self, state: State) -> None:
        """Restore it; a checkpoint of a run without a strategy, or with other fragments, has no velocity for this."""
        arrays = host_arrays(state.arrays)
        velocities = {name: arrays[name] for name in arrays if name.startswith(_VELOCITY)}
        others = arrays.only(lambda name: not name.startswith(_VELOCITY))
        meta = dict(state.meta)
        own = meta.pop("sync", {"steps": 0, "fragments": 0})
        super().load_state(replace(state, arrays=others, meta=meta))
        self._steps, self._alone, self._outers, self._identities = own["steps"], 0, [], []
        fits = self._period.momentum and own["fragments"] == self._period.fragments and own.get("grid") == self._grid
        if velocities and not fits and self._period.momentum:
            log.warning(
                "the checkpoint's velocities of %s are of other fragments or of another Grid: they begin at zero",
                type(self).__name__,
            )
        self._loaded, self._is_loaded = velocities if fits else {}, True
        self._velocities = part_arrays.of_own_part(self._loaded, world=self._world)

    def finish(self) -> Fault | None:
        """End the run: also one whose last weights are those of an earlier step, which a callback has loaded."""
        self._is_loaded = False
        return super().finish()
