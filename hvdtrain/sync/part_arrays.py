"""Arrays that a strategy keeps for the weights of a rank, where a Grid divides the model: each part has others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapter import ShardedArray
from hvdtrain.checkpoint import Kind
from hvdtrain.distributed.world import World

Arrays = Mapping[str, NDArray[Any]]


def of_all_parts(mine: Arrays, *, world: World) -> dict[str, ShardedArray]:
    """Return the arrays of all parts, of the ranks of the first replica, as "name@part"; a collective."""
    grid = world.grid
    described = [[name, [*each.shape], each.dtype.str] for name, each in mine.items()] if grid.replica == 0 else []
    everyones = world.allgather_object([grid.part, described], name="sync.parts")
    found: dict[str, ShardedArray] = {}
    for rank, (part, arrays) in enumerate(everyones):
        for name, shape, dtype in arrays:
            kind = Kind(tuple(shape), np.dtype(dtype))
            found[f"{name}@{part}"] = _sharded(kind, mine[name] if rank == world.rank else None, rank, world)
    return found


def _sharded(kind: Kind, array: NDArray[Any] | None, owner: int, world: World) -> ShardedArray:
    def gather(everywhere: bool) -> NDArray[Any] | None:
        sent = np.zeros(kind.shape, kind.dtype) if array is None else array
        whole = world.broadcast(sent, root=owner, name="sync.part")
        return whole if everywhere or world.is_root else None

    return ShardedArray(kind, gather)


def spread(arrays: Arrays, described: Iterable[tuple[str, list[int], str]], *, world: World) -> dict[str, NDArray[Any]]:
    """Return this part's arrays of those that the root has of all parts, as `of_all_parts` named them; a collective.

    Args:
        arrays: the root's; others' are not looked at.
        described: name, shape and type of each.
        world: the ranks.
    """
    own: dict[str, NDArray[Any]] = {}
    for name, shape, dtype in described:
        sent = arrays[name] if world.is_root else np.zeros(shape, np.dtype(dtype))
        own |= of_own_part({name: world.broadcast(sent, name="sync.part")}, world=world)
    return own


def of_own_part(arrays: Arrays, *, world: World) -> dict[str, NDArray[Any]]:
    """Return this part's arrays of those of all parts, as `of_all_parts` named them; without a Grid, all."""
    named = [(*name.partition("@"), array) for name, array in arrays.items()]
    mine = ("", "" if world.grid is None else world.grid.part)
    return {plain: array for plain, _, part, array in named if part in mine}
