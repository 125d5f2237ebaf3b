"""The division of a weight's numbers among ranks."""

from __future__ import annotations

from collections.abc import Sequence
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

    def of_ranks(self, numels: Sequence[int]) -> list[list[tuple[int, int]]]:
        """Return, for each rank, the bounds of its part of each of these weights."""
        return [[self.bounds(numel, rank) for numel in numels] for rank in range(self.size)]

    def sent(self, lengths: Sequence[int], rank: int) -> tuple[slice, list[int], slice | None]:
        """Return what a rank sends of a vector that has a piece for each rank, and what of it the rank keeps.

        It keeps its own piece if that is the first or the last, which can be left out without a copy: what an alltoall
        receives is new memory.

        Args:
            lengths: of the pieces, in the order of ranks.
            rank: which sends.

        Returns:
            The slice that it sends; how many numbers of it go to each rank; the slice of its own piece, or None if it
            sends that too.
        """
        own = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
        if rank not in (0, self.size - 1):
            return slice(None), list(lengths), None
        counts = [0 if other == rank else length for other, length in enumerate(lengths)]
        return slice(own.stop, None) if rank == 0 else slice(own.start), counts, own

    def is_broadcast(self, numel: int, itemsize: int) -> bool:
        """Say whether to send the parts of a weight by broadcasts, not together with other weights by an allgather."""
        return self.size <= _BROADCASTS and self.length(numel) * itemsize >= _BROADCAST_BYTES
