"""The factors by which whole numbers can be multiplied exactly, as in horovod/common/ops/whole_factor.h."""

from __future__ import annotations

LARGEST = 2**53  # a double holds all whole numbers up to it


def divisor(factor: float) -> int:
    """Return n for a factor 1/n, as of a mean: a rounded 1/49 times 49 is less than 1. 0 for other factors."""
    inverse = round(1.0 / factor) if 1.0 / LARGEST <= abs(factor) < 1.0 else 0
    return inverse if inverse and factor == 1.0 / inverse else 0


def multiplier(factor: float) -> int | None:
    """Return a factor that is a whole number as one; None for other factors."""
    return round(factor) if abs(factor) <= LARGEST and factor == round(factor) else None
