"""Records of a run while it trains: the same moments and names for all loggers and the run folder."""

from __future__ import annotations

import json
import math
import time
from typing import Any

from hvdtrain.callbacks.base import Callback, Logs
from hvdtrain.callbacks.context import RunContext
from hvdtrain.telemetry.interval import PARTS, Interval

Facts = dict[str, Any]


class RecordingCallback(Callback):
    """Calls `record` for intervals and epochs; `RunFolder` documents its arguments, and what a record holds."""

    def __init__(self, every_s: float, options: dict[str, Any] | None) -> None:
        if not every_s >= 0:
            raise ValueError(f"every_s must be >= 0. Received: every_s={every_s!r}")
        json.dumps(options)
        self._options = options or {}
        self._every_s = every_s
        self._recorded_at = -math.inf
        self._newest: Interval | None = None  # not recorded yet

    def record(self, facts: Facts) -> None:
        """Record an interval or an epoch."""
        raise NotImplementedError

    def on_interval(self, trainer: RunContext, interval: Interval) -> None:
        """Record an interval, if it is time."""
        self._newest = interval
        if time.monotonic() - self._recorded_at >= self._every_s:
            self._record_newest()

    def on_epoch_end(self, trainer: RunContext, epoch: int, logs: Logs) -> None:
        """Record the epoch's last interval, then its metrics."""
        self._record_newest()
        facts = {"time": time.time(), "kind": "epoch", "epoch": epoch, "global_step": trainer.global_step}
        self.record({**facts, "metrics": logs})

    def _record_newest(self) -> None:
        interval, self._newest = self._newest, None
        if interval is None:
            return
        self._recorded_at = time.monotonic()
        parts = {part: getattr(interval.times, part) for part in ("step", *PARTS)}
        self.record({
            "time": time.time(), "kind": "interval", "epoch": interval.epoch, "step": interval.step,
            "global_step": interval.global_step, "samples_per_s": interval.samples_per_s,
            "learning_rate": interval.learning_rate, "metrics": interval.metrics,
            "rank_s": {name: [float(f"{value:.6g}") for value in part] for name, part in parts.items()},
        })  # fmt: skip
