"""Let every rank learn, soon and in the same step, that one of them was asked to stop."""

from __future__ import annotations

import time

import numpy as np

from hvdtrain.world import World

_MOST_STEPS = 1000


class Pulse:
    """Exchanges a flag about once a second: after a number of steps that all ranks agree on, by how long steps take.

    A flag in every step would cost a round of its own in each.

    Args:
        world: the ranks.
        interval_s: seconds between two exchanges.
    """

    def __init__(self, world: World, *, interval_s: float = 1.0) -> None:
        self._world = world
        self._interval_s = interval_s
        self._left = self._every = 1
        self._since = time.perf_counter()

    def beat(self, asked: bool) -> bool:
        """Count a step; return whether a rank was asked to stop, the same on all of them.

        Args:
            asked: whether this one was.
        """
        if self._world.size == 1:
            return asked
        self._left -= 1
        if self._left:
            return False
        step_s = (time.perf_counter() - self._since) / self._every
        asked_anywhere, slowest_s = self._world.allreduce(np.array([asked, step_s]), "max", name="pulse")
        self._left = self._every = int(np.clip(self._interval_s / max(slowest_s, 1e-9), 1, _MOST_STEPS))
        self._since = time.perf_counter()
        return bool(asked_anywhere)
