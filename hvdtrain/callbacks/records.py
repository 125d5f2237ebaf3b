"""Records of a run while it trains: the same moments and names for all loggers and the run folder."""

from __future__ import annotations

import math
import time
from typing import Any

from hvdtrain.callbacks.base import Logs
from hvdtrain.callbacks.context import RunContext
from hvdtrain.telemetry.interval import PARTS, Interval

Facts = dict[str, Any]


class Records:
    """Records of intervals and of epochs; `RunFolder` documents their content.

    Args:
        every_s: seconds between two recorded intervals; an epoch's last interval is always recorded.

    Raises:
        ValueError: every_s is below 0.
    """

    def __init__(self, every_s: float) -> None:
        if not every_s >= 0:
            raise ValueError(f"every_s must be >= 0. Received: every_s={every_s!r}")
        self._every_s = every_s
        self._kept = -math.inf
        self._newest: Interval | None = None  # not kept yet

    def of_interval(self, interval: Interval) -> list[Facts]:
        """Return what is to be kept of it now, if it is time."""
        self._newest = interval
        return self._take_newest() if time.monotonic() - self._kept >= self._every_s else []

    def of_epoch(self, trainer: RunContext, epoch: int, logs: Logs) -> list[Facts]:
        """Return the epoch's last interval, which may be shorter than what lies between two, then its metrics."""
        facts = {"time": time.time(), "kind": "epoch", "epoch": epoch, "global_step": trainer.global_step}
        return [*self._take_newest(), {**facts, "metrics": logs}]

    def _take_newest(self) -> list[Facts]:
        interval, self._newest = self._newest, None
        if interval is None:
            return []
        self._kept = time.monotonic()
        times = interval.times
        parts = {part: getattr(times, part) for part in ("step", *PARTS)}
        return [{
            "time": time.time(), "kind": "interval", "epoch": interval.epoch, "step": interval.step,
            "global_step": interval.global_step, "samples_per_s": interval.samples_per_s,
            "learning_rate": interval.learning_rate, "metrics": interval.metrics,
            "rank_s": {name: [float(f"{value:.6g}") for value in part] for name, part in parts.items()},
        }]  # fmt: skip
