"""How fast an epoch goes: its seconds, its samples, and its metrics so far."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapter import Adapter
from hvdtrain.distributed.recorder import recorder
from hvdtrain.distributed.world import World
from hvdtrain.telemetry.interval import HeartbeatReport, Interval
from hvdtrain.training.progress import RunProgress


class Pace:
    """Measures the epochs and intervals of a fit."""

    def __init__(self, adapter: Adapter, world: World, *, samples: int = 0) -> None:
        self._adapter, self._world = adapter, world
        self._began = 0.0
        self._earlier_samples = 0  # of this fit's earlier epochs
        self._reported_samples = samples  # of its intervals; it may resume within an epoch

    @property
    def seconds(self) -> float:
        """The training time of the current epoch on this rank."""
        return time.perf_counter() - self._began

    def begin_epoch(self, *, seconds: float) -> None:
        """Begin an epoch, or the rest of one that has taken so many seconds."""
        self._began = time.perf_counter() - seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time of the block as training."""
        recorder.ended("other")
        since = time.perf_counter()
        yield
        self._began += time.perf_counter() - since
        recorder.ended("outside")

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the epoch so far; a collective."""
        return self._adapter.metrics(lambda vector: self._world.allreduce(vector, name="running"), keep=True)

    def interval(self, report: HeartbeatReport, metrics: dict[str, float], progress: RunProgress) -> Interval:
        """Return the times, samples and metrics of the steps since the last report."""
        samples = self._earlier_samples + progress.consumed.samples
        before, self._reported_samples = self._reported_samples, samples
        return Interval(
            epoch=progress.epoch,
            step=progress.step,
            global_step=progress.global_step,
            steps=report.steps,
            samples=samples - before,
            seconds=report.seconds,
            times=report.times,
            learning_rate=self._adapter.learning_rates[0],
            metrics=metrics,
        )

    def end_epoch(self, progress: RunProgress) -> dict[str, float]:
        """Return the metrics of the epoch, its learning rate and its speed; then settle the adapter's statistics."""
        times = np.zeros(self._world.size)  # one entry per rank: they travel with the metrics

        def reduce(vector: NDArray[np.float64]) -> NDArray[np.float64]:
            times[self._world.rank] = self.seconds  # the device has finished the epoch
            total = self._world.allreduce(np.concatenate([vector, times]), name="metrics")
            times[:] = total[len(vector) :]
            return total[: len(vector)]

        logs = self._adapter.metrics(reduce)
        logs.setdefault("learning_rate", self._adapter.learning_rates[0])  # a metric may have this name
        seconds = float(times.max())
        self._adapter.settle()
        self._earlier_samples += progress.consumed.samples
        return logs | {"samples_per_s": progress.consumed.samples / seconds, "seconds": seconds}
