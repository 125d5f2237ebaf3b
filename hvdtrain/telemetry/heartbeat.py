"""Exchange step times and stop requests between ranks: about once a second, after the same step on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdtrain.distributed.recorder import Recorder, recorder
from hvdtrain.distributed.world import World
from hvdtrain.telemetry.interval import RankTimes

_MOST_STEPS = 1000


@dataclass(frozen=True)
class HeartbeatReport:
    """What all ranks reported, equal on all of them.

    Attributes:
        stop: whether a stop was requested on any rank.
        steps: since the last report.
        seconds: how long these took on the slowest rank.
        times: of each rank.
    """

    stop: bool
    steps: int
    seconds: float
    times: RankTimes


class Heartbeat:
    """Exchanges a flag and times about once a second: after a number of steps that all ranks agree on.

    That number is computed from step times. A flag in every step would cost every step an additional exchange.

    Args:
        world: the ranks.
        interval_s: seconds between two exchanges.
        times: the recorder of this rank's times.
    """

    def __init__(self, world: World, *, interval_s: float = 1.0, times: Recorder = recorder) -> None:
        self._world = world
        self._interval_s = interval_s
        self._recorder = times
        self._recorder.ended("outside")
        self._before = times.read()
        self._steps, self._left = 0, 1

    def beat(self, stop: bool) -> HeartbeatReport | None:
        """Count a step; if an exchange is due, return what ranks reported, equal on all of them.

        Args:
            stop: whether a stop was requested on this rank.
        """
        self._steps += 1
        self._left -= 1
        if self._left and not (stop and self._world.size == 1):
            return None
        self._recorder.ended("other")
        now = self._recorder.read()
        mine, self._before = now.since(self._before), now
        step_s = mine.data + mine.train + mine.other + mine.elsewhere
        row = np.array([step_s, mine.data, mine.train, mine.reduction, mine.other]) / self._steps
        rows, stop_anywhere = self._exchange(np.maximum(row, 0.0), stop)
        self._recorder.ended("outside")
        times = RankTimes(*rows.T)
        slowest_s = float(times.step.max())
        found = HeartbeatReport(stop_anywhere, self._steps, slowest_s * self._steps, times)
        self._steps, self._left = 0, int(np.clip(self._interval_s / max(slowest_s, 1e-9), 1, _MOST_STEPS))
        return found

    def _exchange(self, mine: NDArray[np.float64], stop: bool) -> tuple[NDArray[np.float64], bool]:
        size, rank = self._world.size, self._world.rank
        if size == 1:
            return mine[np.newaxis], stop
        vector = np.zeros(1 + size * len(mine))
        vector[0] = stop
        vector[1:].reshape(size, -1)[rank] = mine
        vector = self._world.allreduce(vector, "max", name="heartbeat")  # no time is below 0: each row has one owner
        return vector[1:].reshape(size, -1), bool(vector[0])
