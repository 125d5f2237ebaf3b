"""The division of a weight's numbers among ranks."""

from __future__ import annotations

from dataclasses import dataclass

# A part begins at a multiple of so many numbers: the kernels of CPUs compute the last few numbers of a tensor by other
# instructions, and these must be the last few of the whole weight.
_ALIGNED = 64


@dataclass(frozen=True)
class Division:
    """A division of weights among ranks; each rank's part is contiguous, in the order of memory.

    Args:
        size: number of ranks.
    """

    size: int

    def length(self, numel: int) -> int:
        """Return the numbers in each part of a weight but the last ones, which may be shorter."""
        blocks = -(-numel // _ALIGNED)
        return int(-(-blocks // self.size) * _ALIGNED)

    def bounds(self, numel: int, rank: int) -> tuple[int, int]:
        """Return where the part of a rank begins and ends; it may be empty."""
        length = self.length(numel)
        return min(rank * length, numel), min((rank + 1) * length, numel)
