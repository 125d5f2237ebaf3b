"""The numbers that travel with a rank's gradients, so that their mean over ranks is that of all samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FAILED = -math.inf  # the weight of a rank that could not compute its gradients; then the sum over ranks is this, too
# Where the sum travels as float32, or times a factor, its rounding is no reason to scale gradients again.
_ROUNDING = 1e-5


@dataclass
class WeightedMean:
    """A rank's weight in the mean and flags of its gradients; after `receive`, their sums over ranks.

    A gradient that is missing on one rank counts as zeros; one that is missing on all ranks stays missing.
    """

    flags: Sequence[float]  # 1 for each gradient that this rank has; then on how many ranks it is
    weight: float | None = None  # None where all ranks know the sum beforehand
    expected: float | None = None  # the sum for which losses were scaled; None for losses that are sums

    @property
    def numbers(self) -> list[float]:
        """The numbers that a rank sends; as many on all ranks, also where others have no weight or FAILED."""
        return [self.weight or 0.0, *self.flags]

    def receive(self, sums: Sequence[float]) -> None:
        """Take the sums over ranks of `numbers`."""
        total, *self.flags = sums
        if self.weight is not None or total == FAILED:
            self.weight = total

    def correction(self, *, rounding: float = _ROUNDING) -> float:
        """Return what gradients that were scaled for `expected` are multiplied by, since the sum is another.

        Args:
            rounding: the relative difference up to which the two sums are the same.
        """
        total, expected = self.weight, self.expected
        if total and expected is not None and abs(total - expected) > rounding * expected:
            return expected / total
        return 1.0
