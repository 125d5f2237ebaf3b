"""The speed of a run: seconds, samples and metrics of its epochs and of the intervals between two heartbeats."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapter import Adapter
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.recorder import recorder
from hvdtrain.distributed.world import World
from hvdtrain.telemetry.interval import Heartbeat, HeartbeatReport, Interval
from hvdtrain.training.progress import RunProgress


class Pace:
    """Measures the epochs and intervals of a fit."""

    def __init__(self, adapter: Adapter, world: World, *, samples: int = 0) -> None:
        self._adapter, self._world, self._ranks = adapter, world, DataRanks(world)
        self._began = 0.0
        self._earlier_samples = 0  # of this fit's earlier epochs
        self._reported_samples = samples  # of its intervals; it may resume within an epoch
        self._heartbeat = Heartbeat(world)
        self._report: tuple[HeartbeatReport, dict[str, float]] | None = None  # of this step, with the metrics so far

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

    @property
    def heartbeat_is_due(self) -> bool:
        """True if the next `beat` exchanges unless it is postponed; equal on all ranks, and False on one rank."""
        return self._heartbeat.is_due

    @property
    def has_report(self) -> bool:
        """True if a heartbeat was exchanged, and `interval` has not returned it yet."""
        return self._report is not None

    def beat(self, stop: bool, *, spent_s: float, limit_s: float, postponed: bool) -> HeartbeatReport | None:
        """Count a step; if a heartbeat is due, exchange it and the epoch's metrics so far. See `Heartbeat.beat`."""
        report = self._heartbeat.beat(stop, spent_s=spent_s, limit_s=limit_s, postponed=postponed)
        if report is not None:
            reduce = functools.partial(self._ranks.allreduce, name="running")
            self._report = report, self._adapter.metrics(reduce, keep=True)
        return report

    def interval(self, progress: RunProgress) -> Interval | None:
        """Return times, samples and metrics of the steps that the last heartbeat reports, once; None without one."""
        if self._report is None:
            return None
        (report, metrics), self._report = self._report, None
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
        """Return the metrics of the epoch, its learning rate and its speed; then average buffers over ranks."""
        times = np.zeros(self._ranks.size)  # one entry per rank: they travel with the metrics

        def reduce(vector: NDArray[np.float64]) -> NDArray[np.float64]:
            times[self._ranks.rank] = self.seconds  # the device has finished the epoch
            total = self._ranks.allreduce(np.concatenate([vector, times]), name="metrics")
            times[:] = total[len(vector) :]
            return total[: len(vector)]

        logs = self._adapter.metrics(reduce)
        logs.setdefault("learning_rate", self._adapter.learning_rates[0])  # a metric may have this name
        seconds = float(times.max())
        if self._ranks.process_set is not None:  # all ranks end a run after equal seconds
            seconds = float(self._world.allreduce(np.array([seconds]), "max", name="seconds")[0])
        self._adapter.average_buffers()
        self._earlier_samples += progress.consumed.samples
        return logs | {"samples_per_s": progress.consumed.samples / seconds, "seconds": seconds}
