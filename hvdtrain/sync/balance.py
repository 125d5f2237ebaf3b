"""Divide the samples of a step among ranks: equally, as given, or by measured speed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.sources import Batch, Consumed, Source, as_divisible
from hvdtrain.telemetry.interval import RankTimes, lower_median

# New shares must forecast a step of at most this part of the present one's time. To leave equal parts takes more.
_FIRST_GAIN, _FURTHER_GAIN = 0.95, 0.98
_FIRST_INTERVALS, _MOST_INTERVALS = 3, 64  # of about a second, before a decision; twice as many after each change
_QUANTA = 32  # a share is a multiple of batch_size / 32 samples
_LARGEST = 2  # times batch_size: what a rank must have memory for


def check_balance(given: Any, *, size: int) -> str | list[float] | None:
    """Return `fit`'s balance as JSON; ValueError unless it is None, "speed", or a positive number for each rank."""
    if given is None or (isinstance(given, str) and given == "speed"):
        return given
    try:
        shares = [float(each) for each in given]
    except (TypeError, ValueError):
        shares = []
    if isinstance(given, str) or not shares or not all(0 < each < math.inf for each in shares):
        raise ValueError(
            'balance must be None, "speed", or a positive number for each rank, such as [3, 3, 1, 1]. '
            f"Received: balance={given!r}"
        )
    if len(shares) != size:
        raise ValueError(
            f"balance must have a number for each of {size} ranks. Received: balance={given!r}, {len(shares)} numbers. "
            'With balance="speed", ranks measure their shares.'
        )
    return shares


class Balance:
    """The shares by which a source divides steps; equal on all ranks, which compute them from the same numbers.

    Args:
        given: as `check_balance` returns it, but not None.
        source: the training data.
        size: number of ranks.

    Attributes:
        shares: samples of a whole step by rank; None for equal parts. The samples of a step stay the same.
    """

    def __init__(self, given: str | list[float], source: Source, *, size: int) -> None:
        self.shares: list[int] | None = None
        self.has_changed = False  # since `rest` was called
        self._source = as_divisible(source, need=f"balance={given!r} divides steps sample by sample.")
        self._by_speed = given == "speed" and size > 1
        self._batch_size, self._size = int(source.facts.get("batch_size") or 1), size
        self._times: list[NDArray[np.float64]] = []  # since the last decision: seconds per sample, shape (size,)
        self._due = _FIRST_INTERVALS
        if isinstance(given, list):
            self._divide(as_given(given, self._batch_size * size))

    def resume(self, shares: Sequence[int] | None) -> None:
        """Continue with the measured shares of a checkpoint, if they are of as many ranks and samples."""
        if self._by_speed and shares and (len(shares), sum(shares)) == (self._size, self._batch_size * self._size):
            self._divide(list(shares))

    def observe(self, times: RankTimes) -> str | None:
        """Learn how long a step took each rank; return a log line if shares change from now on."""
        if not self._by_speed:
            return None
        now = np.array(self.shares or [self._batch_size] * self._size)
        self._times.append((times.compute + times.data) / now)
        if len(self._times) < self._due:
            return None
        # The median: an interval in which a rank compiled, or wrote a checkpoint, is no sign of its speed.
        seconds, self._times = np.median(self._times, axis=0), []
        if not (seconds > 0).all():
            return None
        found = by_speed(1 / seconds, batch_size=self._batch_size)
        gain = _FIRST_GAIN if self.shares is None else _FURTHER_GAIN
        if (seconds * found).max() > gain * (seconds * now).max():
            return None
        self._due = min(2 * self._due, _MOST_INTERVALS)
        self._divide(found)
        slowest = int(seconds.argmax())
        return (
            f"balance: from here on ranks take {', '.join(map(str, found))} of {sum(found)} samples a step (rank "
            f"{slowest} takes {seconds[slowest] / lower_median(seconds):.1f} times the median's time for a sample)"
        )

    def rest(self, epoch: int, consumed: Consumed) -> Iterator[Batch]:
        """Return this rank's batches of the rest of the epoch, by the present shares."""
        self.has_changed = False
        return self._source.rest(epoch, consumed)

    def _divide(self, shares: list[int]) -> None:
        self._source.shares = self.shares = shares
        self.has_changed = True


def as_given(weights: Sequence[float], total: int) -> list[int]:
    """Return whole shares in proportion to `weights`, whose sum is `total`; ValueError if one is without samples."""
    ends = np.rint(np.cumsum([0.0, *weights]) / sum(weights) * total).astype(int)
    shares: list[int] = np.diff(ends).tolist()
    if min(shares) < 1:
        raise ValueError(
            f"balance must leave each rank a sample of a step. Received: balance={list(weights)!r}, which divides "
            f"{total} samples into {shares}. Use a larger batch_size, or less unequal numbers."
        )
    return shares


def by_speed(speeds: NDArray[np.float64], *, batch_size: int) -> list[int]:
    """Return whole shares with which all ranks are done at about the same time.

    Args:
        speeds: samples per second, by rank.
        batch_size: of equal shares.
    """
    quantum, largest = max(1, batch_size // _QUANTA), _LARGEST * batch_size
    shares = np.full(len(speeds), quantum)
    left = batch_size * len(speeds) - int(shares.sum())
    while left > 0:
        step = min(quantum, left)
        done_at = np.where(shares + step <= largest, (shares + step) / speeds, math.inf)
        shares[int(done_at.argmin())] += step
        left -= step
    found: list[int] = shares.tolist()
    return found
