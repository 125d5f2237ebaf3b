"""The tensors of a rank's part of a model that a Grid divides, and what is asked of the whole model's gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import Parameter

from hvdtrain.torch.reduction.tensors import Whole


class GridPart(Whole):
    """This rank's part of the weights; its methods are collectives of the ranks of its replica.

    Args:
        grid: the Grid.
    """

    is_divided = True

    def __init__(self, grid: Any) -> None:
        self._grid = grid

    def are_finite(self, finite: bool) -> bool:
        """Return whether the gradients of the replica's ranks are finite."""
        return not self._over_replica(float(not finite), "max")

    def first(self, index: int | None, name_of: Callable[[int], str]) -> str | None:
        """Return the name of the first stage's first weight, with the part and the rank."""
        grid, found = self._grid, super().first(index, name_of)
        mine = None if found is None else [grid.stage, index, f"{found} ({grid.describe_part()})"]
        how = {"name": "grid.first", "process_set": grid.replica_set}
        everyones = [each for each in grid.world.allgather_object(mine, **how) if each is not None]
        return min(everyones)[-1] if everyones else None

    def add_up(self, number: Tensor) -> None:
        """Replace a number by its sum over the replica's ranks."""
        number.fill_(self._over_replica(float(number), "sum"))

    def clip(self, parameters: Sequence[Parameter], largest: float) -> None:
        """Scale the gradients to a norm of the whole model's of at most `largest`."""
        self._grid.clip_grad_norm_(parameters, largest)

    def _over_replica(self, number: float, op: Any) -> float:
        grid = self._grid
        how = {"name": "grid.replica", "process_set": grid.replica_set}
        return float(grid.world.allreduce(np.array([number]), op, **how)[0])
