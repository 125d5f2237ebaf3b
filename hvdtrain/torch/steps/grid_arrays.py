"""Tensors of the parts of a model that a Grid divides, as whole arrays on rank 0, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.adapter import ShardedArray
from hvdtrain.checkpoint import Kind
from hvdtrain.torch.ops import divided, dtypes
from hvdtrain.torch.ops.gather_ops import alltoall_async


@dataclass(frozen=True)
class Entry:
    """An array of the whole model."""

    owner: int  # the rank of the first replica whose stage has it
    stage: int
    own: str  # its name in the stage
    kind: Kind


def of_stages(grid: Any, mine: Any, *, name: str) -> list[tuple[int, Any]]:
    """Return a JSON value of each stage, and the rank that has given it, in the order of stages; a collective."""
    is_first = not (grid.replica or grid.shard or grid.tensor)
    everyones = grid.world.allgather_object([grid.stage, mine] if is_first else None, name=name)
    found = sorted((each[0], rank) for rank, each in enumerate(everyones) if each is not None)
    return [(rank, everyones[rank][1]) for _, rank in found]


def sharded(grid: Any, entry: Entry, tensor_of: Callable[[str], Any]) -> ShardedArray:
    """Return an array that the ranks of a Grid gather.

    Args:
        grid: the Grid.
        entry: the array.
        tensor_of: returns a tensor of this rank's stage by its name there.
    """

    def gather(everywhere: bool) -> NDArray[Any] | None:
        tensor = None
        if entry.stage == grid.stage:
            tensor = divided.whole(tensor_of(entry.own))  # a collective of the stage's ranks
        mine = None
        if entry.owner == grid.world.rank:
            mine = dtypes.to_array(tensor) if isinstance(tensor, torch.Tensor) else np.asarray(tensor)
        if everywhere:
            sent = np.zeros(entry.kind.shape, entry.kind.dtype) if mine is None else mine
            return np.asarray(grid.world.broadcast(sent, root=entry.owner, name="grid.gather"))
        return _to_root(grid, mine, entry)

    return ShardedArray(entry.kind, gather)


def _to_root(grid: Any, array: NDArray[Any] | None, entry: Entry) -> NDArray[Any] | None:
    """Send an array from its owner to the root alone; a collective, unless the root owns it. None elsewhere."""
    if entry.owner == 0:
        return array
    count = math.prod(entry.kind.shape)
    sent = np.zeros(0, entry.kind.dtype) if array is None else array.reshape(-1)
    splits = [count if rank == 0 and array is not None else 0 for rank in range(grid.world.size)]
    received, _ = alltoall_async(torch.from_numpy(sent), splits, "grid.to_root").wait()
    return np.asarray(received).reshape(entry.kind.shape) if grid.world.is_root else None
