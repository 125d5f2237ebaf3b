"""Name the rank that makes the others wait."""

from __future__ import annotations

import logging

from hvdtrain.callbacks.base import Callback, RunContext
from hvdtrain.telemetry.interval import WORDS, Interval, RankTimes, lower_median

log = logging.getLogger("hvdtrain")

# A rank is named when it was late for so many seconds more than it was not, and cleared when the opposite holds. On a
# busy host, ranks take turns in being late for some seconds. Each further time takes twice as long.
_LONG_S = 18.0
_LEAST_INTERVALS = 3  # however long they are
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
        slow: {rank: its warning} of the ranks that are slow now, and have been for some time.

    Raises:
        ValueError: factor is neither 0 nor above 1.
    """

    def __init__(self, factor: float = 1.3) -> None:
        if factor != 0 and not factor > 1:
            raise ValueError(f"factor must be above 1, or 0 for no warnings. Received: factor={factor!r}")
        self._factor = factor
        # Of each rank, up to its `_limit_s`; time in which it is not late counts down.
        self._late_s: dict[int, float] = {}
        self._limit_s: dict[int, float] = {}
        self._first = True
        self.slow: dict[int, str] = {}

    def on_fit_begin(self, trainer: RunContext) -> None:
        """Reset."""
        self._late_s, self._limit_s, self.slow, self._first = {}, {}, {}, True

    def on_interval(self, trainer: RunContext, interval: Interval) -> None:
        """Check the latest steps. The first step does not count, because it compiles and connects."""
        if self._first or not self._factor or trainer.world.size == 1:
            self._first = False
            return
        own, median = interval.times.own, lower_median(interval.times.own)
        costs_much = own - median > _LEAST_SHARE * interval.times.step.max()
        is_late = (own > self._factor * median) & costs_much
        for rank in range(trainer.world.size):
            self._count(trainer, rank, interval, is_late=bool(is_late[rank]))

    def _count(self, trainer: RunContext, rank: int, interval: Interval, *, is_late: bool) -> None:
        """Count an interval for or against a rank; name the rank, or clear it, at the end of the scale."""
        limit_s = self._limit_s.get(rank, _LONG_S)
        seconds = min(interval.seconds, limit_s / _LEAST_INTERVALS)
        late_s = self._late_s.get(rank, 0.0) + (seconds if is_late else -seconds)
        late_s = self._late_s[rank] = min(max(late_s, 0.0), limit_s)
        host = trainer.hosts[rank]
        if late_s == limit_s and rank not in self.slow:
            self.slow[rank] = describe(rank, host, interval.times)
            said = self.slow[rank]
        elif late_s == 0.0 and rank in self.slow:
            del self.slow[rank]
            self._limit_s[rank] = 2 * limit_s
            said = f"rank {rank} on host {host} is as fast as the others again"
        else:
            return
        if trainer.world.is_root:
            log.warning("%s", said)


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
