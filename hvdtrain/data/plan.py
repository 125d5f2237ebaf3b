"""Plan an epoch: which rank takes which samples in which step, in equal parts, by shares, or as assigned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hvdtrain.data import sharding
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.sharding import Indices, Shard


class Part(NamedTuple):
    """One rank's part of one step."""

    position: int  # of the first sample in the epoch's order; -1 for a part without samples
    indices: Indices  # of the samples
    global_count: int  # samples on all ranks
    largest: int | None  # samples on the rank that has most; None where ranks differ by at most one


class Plan:
    """This rank's part of each step that is left of an epoch: a sequence that computes its items on demand.

    Parts are equal, as in `sharding`, unless `shares` or `assignment` says otherwise.

    Args:
        order: returns the samples at positions in the epoch, such as `EpochOrder(...).at`.
        num_samples: of the epoch.
        batch_size: samples of a rank in a whole step.
        rank: whose parts.
        size: number of ranks.
        start: the epoch's first `start` samples are done, by any number of ranks.
        shares: samples of a whole step by rank. Each step has the same samples as with equal parts.
        assignment: what each rank has left of its own samples; replaces `start` and `shares`. Ranks may have different
            numbers of steps, and only this rank's samples are counted.
    """

    def __init__(
        self,
        order: Callable[[Indices], Indices],
        num_samples: int,
        *,
        batch_size: int,
        rank: int,
        size: int,
        start: int = 0,
        shares: Sequence[int] | None = None,
        assignment: Assignment | None = None,
    ) -> None:
        assigned = assignment or Assignment((0,) * size, start=start)
        self._rank, self._batch_size, self._size = rank, batch_size, size
        # More may be done than `num_samples`: with drop_last, these are fewer on more ranks.
        self._left = max(0, assigned.total(num_samples))
        self._shares, self._is_assigned = None if assignment else shares, assignment is not None
        is_whole = self._shares is not None  # otherwise this rank's own places are consecutive parts
        self._places = range(self._left) if is_whole else range(rank, self._left, size)[assigned.taken[rank] :]
        self._positions = assigned.positions
        self._samples = Shard(lambda places: order(assigned.positions(places)), self._places)

    @property
    def is_equal(self) -> bool:
        """True if ranks take equal parts."""
        return self._shares is None and not self._is_assigned

    def __len__(self) -> int:
        if self._is_assigned:
            return -(-len(self._places) // self._batch_size)
        return sharding.steps_per_epoch(self._left, batch_size=self._batch_size, size=self._size)

    def __iter__(self) -> Iterator[Part]:
        for step in range(len(self)):
            yield self[step]

    def __getitem__(self, step: int) -> Part:
        """Return the part of a step, which counts from the first one that is left; in O(batch_size)."""
        count = sharding.samples_in_step(step, self._left, batch_size=self._batch_size, size=self._size)
        first, last, largest = step * self._batch_size, (step + 1) * self._batch_size, None
        if self._shares is not None:
            ends = [first * self._size + end for end in sharding.divide(count, self._shares)]
            first, last = ends[self._rank : self._rank + 2]
            largest = max(after - before for before, after in pairwise(ends))
        indices = self._samples[first:last]
        if self._is_assigned:
            count = largest = len(indices)
        position = int(self._positions(np.asarray(self._places[first]))) if len(indices) else -1
        return Part(position, indices, count, largest)
