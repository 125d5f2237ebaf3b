"""Exchange step times and stop requests between ranks: about once a second, after the same step on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdtrain.distributed.recorder import Recorder, recorder
from hvdtrain.distributed.world import World
from hvdtrain.telemetry.interval import RankTimes

INTERVAL_S, _MOST_STEPS = 1.0, 1000  # between two exchanges


@dataclass(frozen=True)
class HeartbeatReport:
    """What all ranks reported, equal on all of them."""

    stop: bool  # whether a stop was requested on any rank
    steps: int  # since the last report
    seconds: float  # how long these took on the slowest rank
    times: RankTimes


class Heartbeat:
    """Exchanges a flag and times about once a second: after a number of steps that all ranks agree on.

    That number is computed from step times. A flag in every step would cost every step an additional exchange.
    """

    def __init__(self, world: World, *, times: Recorder = recorder) -> None:
        self._world = world
        self._recorder = times
        self._recorder.ended("outside")
        self._before = times.read()
        self._steps, self._left = 0, 1

    def beat(self, stop: bool) -> HeartbeatReport | None:
        """Count a step; if an exchange is due, return what ranks reported, equal on all of them."""
        self._steps += 1
        self._left -= 1
        if self._left and not (stop and self._world.size == 1):
            return None
        self._recorder.ended("other")
        now = self._recorder.read()
        mine, self._before = now.since(self._before), now
        step_s = mine.data + mine.train + mine.other + mine.elsewhere
        row = np.array([step_s, mine.data, mine.train, mine.reduction, mine.other]) / self._steps
        size = self._world.size
        vector = np.zeros(1 + size * len(row))
        vector[0] = stop
        vector[1:].reshape(size, -1)[self._world.rank] = np.maximum(row, 0.0)
        if size > 1:  # no time is below 0: each row has one owner
            vector = self._world.allreduce(vector, "max", name="heartbeat")
        self._recorder.ended("outside")
        times = RankTimes(*vector[1:].reshape(size, -1).T)
        slowest_s = float(times.step.max())
        found = HeartbeatReport(bool(vector[0]), self._steps, slowest_s * self._steps, times)
        self._steps, self._left = 0, int(np.clip(INTERVAL_S / max(slowest_s, 1e-9), 1, _MOST_STEPS))
        return found
