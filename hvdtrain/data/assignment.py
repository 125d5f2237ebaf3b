"""Find the samples of an epoch that each rank has left, where ranks have taken different numbers of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from hvdtrain.data.sharding import Indices


@dataclass(frozen=True)
class Assignment:
    """Assigns positions in the epoch's order to ranks; equal on all ranks.

    It assigns the positions in `left` first, and then all positions from `start` on. Rank r gets every size-th of
    them, from the r-th on, as in `sharding`; it has taken the first `taken[r]` of its own.

    Attributes:
        taken: how many of its samples each rank has taken.
        start: the positions from here on are assigned.
        left: earlier positions, which were not used; a tuple, because checkpoints hold it as JSON.
    """

    taken: tuple[int, ...]
    start: int = 0
    left: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Assignment:
        """Return what `asdict` was called on."""
        return cls(tuple(value["taken"]), int(value["start"]), tuple(value["left"]))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.taken)

    def total(self, num_samples: int) -> int:
        """Return the number of positions that are assigned, of an epoch of `num_samples`."""
        return len(self.left) + num_samples - self.start

    def remaining(self, num_samples: int) -> Indices:
        """Return how many samples each rank has left: shape (size,)."""
        total = self.total(num_samples)
        return np.array([len(range(rank, total, self.size)) - taken for rank, taken in enumerate(self.taken)])

    def positions(self, places: Indices) -> Indices:
        """Return the positions at `places` among those that are assigned: int64, of the shape of `places`."""
        moved = places - len(self.left) + self.start
        if not self.left:
            return moved
        left = self._left
        return np.where(places < len(left), left[np.minimum(places, len(left) - 1)], moved)

    @cached_property
    def _left(self) -> Indices:
        return np.array(self.left, np.int64)  # once: there may be millions

    def take(self, samples: Sequence[int]) -> Assignment:
        """Return the assignment after each rank has taken so many samples more."""
        return replace(self, taken=tuple(int(a + b) for a, b in zip(self.taken, samples, strict=True)))

    def reassign(self, num_samples: int, *, size: int) -> Assignment:
        """Assign all that is left to `size` ranks: first what ranks that are behind have left over."""
        total = self.total(num_samples)
        # No rank has taken a sample from here on, so these positions need no list.
        untouched = min(total, max(len(self.left), max(self.taken) * self.size))
        places = [np.arange(rank + taken * self.size, untouched, self.size) for rank, taken in enumerate(self.taken)]
        left = self.positions(np.sort(np.concatenate(places)))
        return Assignment((0,) * size, self.start + untouched - len(self.left), tuple(left.tolist()))
