"""About once a second, let every rank learn in the same step what the others have to tell."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdtrain.distributed import wait_time
from hvdtrain.distributed.world import World
from hvdtrain.telemetry.interval import RankTimes

_MOST_STEPS = 1000


@dataclass(frozen=True)
class Beat:
    """What ranks told each other, equal on all of them.

    Attributes:
        asked: whether one of them was asked to stop.
        steps: since the last beat.
        seconds: that these took, on the slowest rank.
        times: of each rank.
    """

    asked: bool
    steps: int
    seconds: float
    times: RankTimes


class Pulse:
    """Exchanges a flag and times about once a second: after a number of steps that all ranks agree on.

    That number follows from how long steps take. A flag in every step would cost a round of its own in each.

    Args:
        world: the ranks.
        interval_s: seconds between two exchanges.
    """

    def __init__(self, world: World, *, interval_s: float = 1.0) -> None:
        self._world = world
        self._interval_s = interval_s
        self._left = 1
        self._seconds = self._data_s = self._train_s = 0.0
        self._waited_s = self._train_waited_s = 0.0  # outside of graphs, which wait for gradients alone
        self._start_over()
        self.go_on()

    def go_on(self) -> None:
        """Let steps begin now: what was done since the last one, such as validation, is none."""
        self._last, self._waited, self._loading_s = time.perf_counter(), wait_time.outside_graphs(), 0.0

    def begin_loading(self) -> None:
        """Begin to measure the wait for a step's batches, without that for other ranks'."""
        self._loading_began, self._loading_waited = time.perf_counter(), wait_time.outside_graphs()

    def end_loading(self) -> None:
        """End it; it is counted with the step."""
        waited_s = wait_time.outside_graphs() - self._loading_waited
        self._loading_s = time.perf_counter() - self._loading_began - waited_s

    @contextmanager
    def training(self) -> Iterator[None]:
        """Count the time within as a step's training: all of it but its data and its callbacks."""
        began, before = time.perf_counter(), wait_time.outside_graphs()
        with wait_time.device.training() if wait_time.device is not None else nullcontext():
            yield
        self._train_s += time.perf_counter() - began
        self._train_waited_s += wait_time.outside_graphs() - before

    def beat(self, asked: bool) -> Beat | None:
        """Count a step; return what ranks told each other if it was time to, the same on all of them.

        Args:
            asked: whether this rank was asked to stop.
        """
        now, waited_s = time.perf_counter(), wait_time.outside_graphs()
        self._seconds, self._last = self._seconds + now - self._last, now
        self._waited_s, self._waited = self._waited_s + waited_s - self._waited, waited_s
        self._data_s, self._loading_s = self._data_s + self._loading_s, 0.0
        self._steps += 1
        self._left -= 1
        if self._left and not (asked and self._world.size == 1):
            return None
        rows, asked_anywhere = self._exchange(self._mine() / self._steps, asked)
        times = RankTimes(*rows.T)
        slowest_s = float(times.step.max())
        found = Beat(asked_anywhere, self._steps, slowest_s * self._steps, times)
        self._left = int(np.clip(self._interval_s / max(slowest_s, 1e-9), 1, _MOST_STEPS))
        self._start_over()
        self.go_on()
        return found

    def _mine(self) -> NDArray[np.float64]:
        """Return this rank's seconds since the last beat, in the order of `RankTimes`."""
        data_s, train_s = self._data_s, self._train_s
        reduction_s = self._train_waited_s + wait_time.in_graphs() - self._graphs_s
        elsewhere_s = self._waited_s - self._train_waited_s  # for others' data, and in callbacks
        if wait_time.device is not None:
            trained_s, reduced_s = wait_time.device.read()
            train_s, reduction_s = trained_s - self._device_s[0], reduced_s - self._device_s[1]
            self._seconds += time.perf_counter() - self._last  # until the device was there
            data_s = min(data_s, max(0.0, self._seconds - train_s))  # what it did not compute behind
        other_s = max(0.0, self._seconds - data_s - train_s - elsewhere_s)
        return np.array([self._seconds, data_s, train_s, reduction_s, other_s])

    def _exchange(self, mine: NDArray[np.float64], asked: bool) -> tuple[NDArray[np.float64], bool]:
        size, rank = self._world.size, self._world.rank
        if size == 1:
            return mine[np.newaxis], asked
        vector = np.zeros(1 + size * len(mine))
        vector[0] = asked
        vector[1:].reshape(size, -1)[rank] = mine
        vector = self._world.allreduce(vector, "max", name="pulse")  # each has its own places: no time is below 0
        return vector[1:].reshape(size, -1), bool(vector[0])

    def _start_over(self) -> None:
        self._steps = 0
        self._seconds = self._data_s = self._train_s = self._waited_s = self._train_waited_s = 0.0
        self._graphs_s = wait_time.in_graphs()
        self._device_s = wait_time.device.read() if wait_time.device is not None else (0.0, 0.0)
