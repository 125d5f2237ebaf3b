"""The places of ranks in a grid: replicas of a model, each of stages, shards and tensor parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

AXES = ("replica", "stage", "shard", "tensor")  # the last one's ranks are neighbours: they exchange most


@dataclass(frozen=True)
class Layout:
    """Ranks as an array over `AXES`.

    Attributes:
        ranks: int array, shape (replicas, stages, shard, tensor); every rank of the job once.
        split: the replicas whose ranks are on more than one host, although a host has room for a whole one.
    """

    ranks: NDArray[Any]
    split: tuple[int, ...] = ()

    @classmethod
    def of(cls, hosts: Sequence[str], *, stages: int = 1, shard: int = 1, tensor: int = 1) -> Layout:
        """Return the layout of a job whose rank r runs on hosts[r].

        Ranks of one host are placed together, in whatever order the launcher numbered them.

        Raises:
            ValueError: if a length is below 1, or the ranks cannot be divided into whole replicas.
        """
        lengths = {"stages": stages, "shard": shard, "tensor": tensor}
        for name, length in lengths.items():
            if not isinstance(length, int) or length < 1:
                raise ValueError(f"{name} must be a whole number of ranks, at least 1. Received: {name}={length!r}")
        size, each = len(hosts), stages * shard * tensor
        if size % each or not size:
            fewer = size // each * each
            counts = f"{fewer} or {fewer + each}" if fewer else str(each)
            given = " x ".join(f"{name}={length}" for name, length in lengths.items() if length > 1)
            raise ValueError(
                f"A replica of {given} needs {each} ranks, and {size} ranks cannot be divided into such replicas. "
                f"Launch {counts} ranks"
            )
        first_of = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
        order = sorted(range(size), key=lambda rank: (first_of[hosts[rank]], rank))
        ranks = np.array(order).reshape(-1, stages, shard, tensor)
        rooms = [hosts.count(host) for host in set(hosts)]
        fits = max(rooms) >= each
        split = [
            index for index, part in enumerate(ranks) if fits and len({hosts[rank] for rank in part.reshape(-1)}) > 1
        ]
        return cls(ranks, tuple(split))

    def length(self, axis: str) -> int:
        """Return the number of places along an axis."""
        return int(self.ranks.shape[AXES.index(axis)])

    def place(self, rank: int) -> dict[str, int]:
        """Return a rank's place along each axis."""
        (found,) = np.argwhere(self.ranks == rank)
        return dict(zip(AXES, map(int, found), strict=True))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return the groups of ranks that differ along these axes only; each rank is in one, in the axes' order."""
        moved = [AXES.index(axis) for axis in axes]
        rows = np.moveaxis(self.ranks, moved, range(-len(moved), 0))
        width = int(np.prod([self.ranks.shape[index] for index in moved], dtype=int))
        return [tuple(map(int, row)) for row in rows.reshape(-1, width)]

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the group of `rank` along these axes."""
        return next(each for each in self.groups(*axes) if rank in each)
