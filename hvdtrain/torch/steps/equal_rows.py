"""Give the ranks of a shard group micro-batches of one size, because they gather each layer's weights together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hvdtrain.errors import HvdTrainError


class Rows(NamedTuple):
    """What the ranks of a shard group compute of a batch; equal on all of them."""

    most: int  # samples, on the rank that has most
    is_weighed: bool  # True if a target counts on any rank


class EqualRows:
    """Agrees on the rows of each batch, and fills up the batches of ranks that have fewer.

    The rows that are added repeat the last one. Nothing is computed of their outputs, so their gradients are zeros.
    """

    def __init__(self, grid: Any) -> None:
        self._grid, self._world = grid, grid.world

    @property
    def is_shared(self) -> bool:
        """True if other ranks wait for this one where it has no samples."""
        return bool(self._grid.shards > 1)

    def agree(self, inputs: Sequence[Any], counts: Sequence[int], weights: Sequence[float]) -> list[Rows]:
        """Return what is computed of each batch; a collective of a shard group.

        Raises:
            HvdTrainError: on all ranks of the group, if their samples differ in shape, or one never had any.
        """
        mine = [(count, bool(weight)) for count, weight in zip(counts, weights, strict=True)]
        if not self.is_shared:
            return [Rows(*each) for each in mine]
        shapes = [list(each.shape[1:]) if isinstance(each, torch.Tensor) else None for each in inputs]
        everyones = self._world.allgather_object([mine, shapes], name="grid.rows", process_set=self._grid.shard_set)
        found = []
        for index in range(len(mine)):
            rows = Rows(*(max(values) for values in zip(*(each[0][index] for each in everyones), strict=True)))
            of_ranks = [each[1][index] for each in everyones]
            if rows.most and any(shape is None or shape != of_ranks[0] for shape in of_ranks):
                raise HvdTrainError(
                    "The ranks of a shard group compute each micro-batch of a pipeline together, so their samples need "
                    "one shape: pad them alike, and give every rank at least one sample. Received: samples of shapes "
                    f"{' and '.join(map(str, of_ranks))} (None: no samples yet), on rank {self._world.rank}"
                )
            found.append(rows)
        return found

    def fill(self, inputs: Any, count: int, rows: int) -> Any:
        """Return the first `count` inputs, and repetitions up to so many rows."""
        if count == rows:
            return inputs
        last = inputs[max(count - 1, 0)][None]
        return torch.cat([inputs[:count], last.expand(rows - count, *last.shape[1:])])
