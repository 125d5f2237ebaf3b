"""The division of a weight's numbers among ranks."""

from __future__ import annotations

from dataclasses import dataclass

# A part begins at a multiple of so many numbers: the kernels of CPUs compute the last few numbers of a tensor by other
# instructions, and these must be the last few of the whole weight.
_ALIGNED = 64
# On so few ranks, a weight with parts of so many bytes is sent by a broadcast of each part: in place, and on CPUs in a
# half to a third of the time of an allgather, whose result is new memory. Over two ranks and MPI, 16 MiB took 2 ms
# instead of 4, and 36 MB took 12 instead of 35.
_BROADCASTS = 8
_BROADCAST_BYTES = 2**16


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

    def is_broadcast(self, numel: int, itemsize: int) -> bool:
        """Say whether to send the parts of a weight by broadcasts, not together with other weights by an allgather."""
        return self.size <= _BROADCASTS and self.length(numel) * itemsize >= _BROADCAST_BYTES
