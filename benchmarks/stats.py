"""Medians and ratios, with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """A median with the quartiles of what it was taken from."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}-{self.high:.3f}]"


def spread(values: Sequence[float]) -> Spread:
    """Return the median and quartiles; of fewer than four values, the smallest and largest."""
    if len(values) < 4:
        return Spread(statistics.median(values), min(values), max(values))
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratio(result: dict[str, Any], peer: str, against: str) -> Spread | None:
    """Return one peer's step time over another's: turn by turn, so that what slows both down cancels out."""
    ours, theirs = (result["peers"].get(name, {}).get("block_ms") for name in (peer, against))
    if not ours or not theirs:
        return None
    return spread([a / b for a, b in zip(ours, theirs, strict=False)])
