"""Name the rank that makes the others wait."""

from __future__ import annotations

import logging

import numpy as np

from hvdtrain.callbacks.base import Callback, RunContext
from hvdtrain.telemetry.interval import WORDS, Interval, RankTimes, lower_median

log = logging.getLogger("hvdtrain")

_IN_A_ROW = 3  # intervals: a single slow second is not reported
_IN_A_ROW_S = 2.5  # the first intervals of a run may have few steps, and be much shorter than a second
_LEAST_SHARE = 0.1  # of a step that the other ranks lose: less is not reported
_ADVICE = {
    "compute": "Look at its host: other processes, clocks and heat, a GPU or core shared with another rank. If it "
    'stays slow, fit(balance="speed") gives it fewer samples.',
    "data": "Look at what feeds it: its disk or network file system, DataLoader workers, other jobs' I/O.",
    "other": "Look at its callbacks: how often they write, and to what disk or server.",
}


class Stragglers(Callback):
    """Warn, on rank 0, of ranks that are slower than the others, with their host and what takes longer there.

    A step is as fast as its slowest rank. A rank is compared by its own time: data, computing, callbacks; the other
    ranks spend the difference in the reduction. The Trainer adds a Stragglers if you pass none. It uses the times of
    the heartbeat.

    Args:
        factor: a rank is slow above `factor` times the median rank's own time; 0 switches the warning off.

    Attributes:
        slow: {rank: its warning} of the ranks that are slow now.

    Raises:
        ValueError: factor is neither 0 nor above 1.
    """

    def __init__(self, factor: float = 1.3) -> None:
        if factor != 0 and not factor > 1:
            raise ValueError(f"factor must be above 1, or 0 for no warnings. Received: factor={factor!r}")
        self._factor = factor
        self._late: dict[int, tuple[int, float]] = {}  # rank -> late intervals in a row, and their seconds
        self._first = True
        self.slow: dict[int, str] = {}

    def on_fit_begin(self, trainer: RunContext) -> None:
        """Reset."""
        self._late, self.slow, self._first = {}, {}, True

    def on_interval(self, trainer: RunContext, interval: Interval) -> None:
        """Check the latest steps. The first step does not count, because it compiles and connects."""
        if self._first or not self._factor or trainer.world.size == 1:
            self._first = False
            return
        own, median = interval.times.own, lower_median(interval.times.own)
        costs_much = own - median > _LEAST_SHARE * interval.times.step.max()
        late = np.flatnonzero((own > self._factor * median) & costs_much).tolist()
        before = {rank: self._late.get(rank, (0, 0.0)) for rank in late}
        self._late = {rank: (times + 1, seconds + interval.seconds) for rank, (times, seconds) in before.items()}
        for rank, (times, seconds) in self._late.items():
            if rank in self.slow or times < _IN_A_ROW or seconds < _IN_A_ROW_S:
                continue
            self.slow[rank] = describe(rank, trainer.hosts[rank], interval.times)
            if trainer.world.is_root:
                log.warning("%s", self.slow[rank])
        for rank in [rank for rank in self.slow if rank not in late]:
            del self.slow[rank]
            if trainer.world.is_root:
                log.warning("rank %d on host %s is as fast as the others again", rank, trainer.hosts[rank])


def describe(rank: int, host: str, times: RankTimes) -> str:
    """Return the message about a slow rank: how much slower it is, and in which part of a step."""
    own, median = times.own[rank], lower_median(times.own)
    cause = max(_ADVICE, key=lambda part: getattr(times, part)[rank] - lower_median(getattr(times, part)))
    mine, others = getattr(times, cause)[rank], lower_median(getattr(times, cause))
    return (
        f"rank {rank} on host {host} is slow, and all ranks wait for it: a step takes it {_ms(own)} by itself, the "
        f"median rank {_ms(median)}; {WORDS[cause]} takes it {_ms(mine)}, the median {_ms(others)}. {_ADVICE[cause]}"
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
