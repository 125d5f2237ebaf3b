"""Allreduce by size: what is measured, how fast it could be at best, and the line through it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.errors import UsageError
from hvdtrain.telemetry.step_times import Spread

ELEMENT_BYTES = 4  # float32
FACTOR = 4
WARMUP = 3
MIN_COPY_BYTES = 64 << 10  # below this, a copy's time is the call's
_MIN_COPIES = 10
_COPY_S = 0.03  # long beside the moment in which ranks leave a barrier, so that they do copy at once


def moved_bytes(num_bytes: float, ranks: int) -> float:
    """Return 2(N-1)/N * bytes: what each rank must send, and receive, in any allreduce over N ranks."""
    return 2 * (ranks - 1) / ranks * num_bytes


@dataclass(frozen=True)
class Point:
    """The measurements of one message size."""

    num_bytes: int  # of the message
    time_s: Spread  # an allreduce on the slowest rank, seconds
    repeats: int  # how often it was measured
    copy_bytes_per_s: Spread  # at which each rank copies as many bytes in memory while all do; mean over ranks
    floor_s: float | None = None  # the time it takes at least; None where the speed is not known

    def bus_bytes_per_s(self, ranks: int) -> float:
        """Bytes that each rank had to move, over the median time."""
        return moved_bytes(self.num_bytes, ranks) / self.time_s.median

    @property
    def floor_share(self) -> float | None:
        """Floor over median: 1.0 is as fast as can be."""
        return None if self.floor_s is None else self.floor_s / self.time_s.median

    @classmethod
    def from_dict(cls, point: dict[str, Any]) -> Point:
        """Return what `dataclasses.asdict` made a dict of."""
        spreads = {name: Spread(**point[name]) for name in ("time_s", "copy_bytes_per_s")}
        return cls(**{**point, **spreads})


@dataclass(frozen=True)
class Fit:
    """time = alpha_s + bytes * beta_s_per_byte, by least squares of the relative errors; neither below zero."""

    # Relative, because the times span five powers of ten: plain least squares would see the largest size only.

    alpha_s: float
    beta_s_per_byte: float
    worst: float  # the largest relative distance of a median from the line


def sizes(max_bytes: int) -> list[int]:
    """Return the sizes to measure: 4 B and each four times the one before, up to `max_bytes`, which is the last."""
    if max_bytes < ELEMENT_BYTES:
        raise UsageError(f"--max-bytes must be at least {ELEMENT_BYTES}, one float32. Received: {max_bytes}")
    last = max_bytes - max_bytes % ELEMENT_BYTES
    found = [ELEMENT_BYTES]
    while found[-1] * FACTOR <= last:
        found.append(found[-1] * FACTOR)
    return found if found[-1] == last else [*found, last]


def repeats_for(once_s: float, *, budget_s: float) -> int:
    """Return how often to measure what takes `once_s`: 5 to 200 times, as the budget allows."""
    return max(5, min(200, int(budget_s / max(once_s, 1e-9))))


def measure(
    reduce: Callable[[], None],
    *,
    budget_s: float,
    agree: Callable[[float], float],
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the seconds of each of many allreduces; `agree` makes all ranks repeat equally often, by a maximum."""
    for _ in range(WARMUP):
        reduce()
    began = clock()
    for _ in range(WARMUP):
        reduce()
    times = []
    for _ in range(repeats_for(agree((clock() - began) / WARMUP), budget_s=budget_s)):
        began = clock()
        reduce()
        times.append(clock() - began)
    return times


def slowest(by_rank: Sequence[Sequence[float]]) -> Spread:
    """Return the spread of the rank whose median is largest."""
    return max((Spread.of(times) for times in by_rank), key=lambda spread: spread.median)


def fit(points: Sequence[Point]) -> Fit | None:
    """Return the line through the medians; None for fewer than two sizes."""
    if len(points) < 2:
        return None
    rows = np.array([(1 / p.time_s.median, p.num_bytes / p.time_s.median) for p in points])  # alpha * a + beta * b ~ 1
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0].tolist()
    if alpha < 0 or beta < 0:
        alone = (rows.sum(axis=0) / (rows**2).sum(axis=0)).tolist()
        alpha, beta = (0.0, alone[1]) if alpha < 0 else (alone[0], 0.0)
    return Fit(alpha, beta, float(np.abs(rows @ (alpha, beta) - 1).max()))


def copy_bandwidth(
    barrier: Callable[[], None], *, num_bytes: int, clock: Callable[[], float] = time.perf_counter
) -> Spread:
    """Return the bytes a second that this rank copies, with one thread, while all ranks copy as large a message."""
    num_bytes = max(num_bytes, MIN_COPY_BYTES)
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    rates: list[float] = []
    barrier()
    first = clock()
    while len(rates) < _MIN_COPIES or clock() - first < _COPY_S:
        began = clock()
        np.copyto(target, source)
        rates.append(num_bytes / (clock() - began))
    return Spread.of(rates[1:])  # the first one finds its pages
