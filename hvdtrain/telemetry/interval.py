"""Exchange facts about the latest steps: speed, parts of the time, the slowest rank, requests to stop."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdtrain.distributed.recorder import Recorder, recorder
from hvdtrain.distributed.world import World

INTERVAL_S, _MOST_STEPS = 1.0, 1000  # between two exchanges
# All ranks may wait in an exchange, as on a link with a high latency. Then the next one comes after so many times the
# wait, in place of after INTERVAL_S, but after at most so many times INTERVAL_S.
_WAIT_FACTOR, _MOST_INTERVALS = 20, 10
PARTS = ("compute", "data", "reduction", "other")  # of a step
COMPARED_S = 10.0  # in less time, differences between ranks or runs are chance
# What makes up a rank's own time, as sentences name it.
WORDS = {"compute": "computing", "data": "waiting for data", "other": "what it does between steps"}


@dataclass(frozen=True)
class RankTimes:
    """Mean seconds per step; arrays of shape (size,), one entry per rank.

    Attributes:
        step: whole steps, from the end of one to the end of the next.
        data: waiting for the next batches.
        train: forward, backward, reduction, update.
        reduction: the part of train that waits for reduced gradients, and so for slower ranks; 0 on one rank. On a GPU
            this includes the wait for the backward pass; if the host runs ahead of the GPU, the GPU's clock measures
            all times.
        other: neither data nor train: callbacks and other work between two steps, without waits for other ranks in
            collectives of `trainer.world`.
    """

    step: NDArray[np.float64]
    data: NDArray[np.float64]
    train: NDArray[np.float64]
    reduction: NDArray[np.float64]
    other: NDArray[np.float64]

    @property
    def compute(self) -> NDArray[np.float64]:
        """The time of forward, backward and update."""
        return np.maximum(self.train - self.reduction, 0.0)

    @property
    def elsewhere(self) -> NDArray[np.float64]:
        """The time of waits for other ranks outside the reduction: in callbacks, checkpoints, iterable data."""
        return np.maximum(self.step - self.data - self.train - self.other, 0.0)

    @property
    def own(self) -> NDArray[np.float64]:
        """The time of a step without waits for other ranks: it shows which rank is slow."""
        return self.data + self.compute + self.other


@dataclass(frozen=True)
class Interval:
    """About a second of training, the same on every rank.

    Attributes:
        epoch: from 0.
        step: optimizer steps of the epoch so far.
        global_step: optimizer steps of the run.
        steps: optimizer steps in this interval.
        samples: samples in this interval, over all ranks.
        seconds: length of the interval, on the slowest rank.
        times: each rank's mean times of a step.
        learning_rate: the first parameter group's, after the last step.
        metrics: metrics of the epoch so far, exact over all ranks.
    """

    epoch: int
    step: int
    global_step: int
    steps: int
    samples: int
    seconds: float
    times: RankTimes
    learning_rate: float
    metrics: dict[str, float]

    @property
    def samples_per_s(self) -> float:
        """Samples per second, over all ranks."""
        return self.samples / self.seconds if self.seconds else 0.0


def lower_median(values: NDArray[np.float64]) -> float:
    """Return the median of the ranks' values, the lower one of two: with two ranks, the faster is the reference."""
    return float(np.sort(values)[(len(values) - 1) // 2])


@dataclass(frozen=True)
class HeartbeatReport:
    """The reports of all ranks together, equal on all of them."""

    stop: bool  # whether a stop was requested on any rank
    spent_s: float  # `beat`'s, the largest of any rank
    steps: int  # since the last report
    seconds: float  # how long these took on the slowest rank
    times: RankTimes


class Heartbeat:
    """Exchanges a flag and times about once a second, after a number of steps that all ranks agree on.

    If all ranks wait in these exchanges, they are less frequent: at most ten seconds apart, or one step if longer.
    """

    def __init__(self, world: World, *, times: Recorder = recorder) -> None:
        self._world = world
        self._recorder = times
        self._recorder.ended("outside")
        self._before = times.read()
        self._steps, self._left = 0, 1
        self._wait_s = 0.0  # in this rank's last exchange

    @property
    def is_due(self) -> bool:
        """True if the next `beat` exchanges unless it is postponed; equal on all ranks, and False on one rank."""
        return self._left <= 1 and self._world.size > 1

    def beat(
        self, stop: bool, *, spent_s: float = 0.0, limit_s: float = math.inf, postponed: bool = False
    ) -> HeartbeatReport | None:
        """Count a step; if an exchange is due, return what ranks reported, equal on all of them.

        With a limit, which must be equal on all ranks, an exchange comes soon after the run has taken `limit_s`. One
        that is `postponed`, on all ranks, comes after a later step.
        """
        self._steps += 1
        self._left -= 1
        if (self._left > 0 or postponed) and not (self._world.size == 1 and (stop or spent_s >= limit_s)):
            return None
        self._recorder.ended("other")
        now = self._recorder.read()
        mine, self._before = now.since(self._before), now
        train = mine.compute + mine.backward + mine.reduction
        step_s = mine.data + train + mine.other + mine.elsewhere
        row = np.array([step_s, mine.data, train, mine.reduction, mine.other]) / self._steps
        size = self._world.size
        vector = np.zeros(3 + size * len(row))
        # Negative, so that max gives the shortest wait: longer ones include waiting for slower ranks.
        vector[:3] = stop, spent_s, -self._wait_s
        vector[3:].reshape(size, -1)[self._world.rank] = np.maximum(row, 0.0)
        if size > 1:  # no time is below 0: each row has one owner
            began = time.perf_counter()
            vector = self._world.allreduce(vector, "max", name="heartbeat")
            self._wait_s = time.perf_counter() - began
        self._recorder.ended("outside")
        times = RankTimes(*vector[3:].reshape(size, -1).T)
        slowest_s = float(times.step.max())
        found = HeartbeatReport(bool(vector[0]), float(vector[1]), self._steps, slowest_s * self._steps, times)
        spaced_s = min(-_WAIT_FACTOR * float(vector[2]), _MOST_INTERVALS * INTERVAL_S)
        interval_s = min(max(INTERVAL_S, spaced_s), limit_s - found.spent_s)
        self._steps, self._left = 0, int(np.clip(interval_s / max(slowest_s, 1e-9), 1, _MOST_STEPS))
        return found
