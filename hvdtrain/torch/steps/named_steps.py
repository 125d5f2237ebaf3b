"""Ranks agree on which optimizer a step is for: on the names that the user's generators yield."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import World
from hvdtrain.errors import DesyncError
from hvdtrain.torch.ops.names import parameters_of

Chosen = tuple[str, ...]  # the names of the optimizers that a loss trains
END: Chosen = ()  # what a generator that has ended yields


class Names:
    """Exchanges what each rank yields, and what its loss divides by: one small allreduce a yield."""

    def __init__(self, names: Sequence[str], world: World) -> None:
        self._known, self._ranks = list(names), DataRanks(world)

    def agree(
        self, names: Chosen | None, weight: float, begun: Chosen | None = None, *, first: bool = False
    ) -> tuple[Chosen, float]:
        """Return what all ranks yield, and the sum of their weights; a rank without samples has None.

        Names are returned in the order of the optimizers. `begun` is what the step's first batch has yielded, if this
        is another one. `first` is True for the first yield.

        Raises:
            ValueError: on every rank, if one yields an unknown name, or none yields anything.
            DesyncError: on every rank, if they yield different names.
        """
        is_known = names is None or set(names) <= set(self._known)
        mine = [names == END, *(name in (names or ()) for name in self._known)]
        vector = np.array([weight, not is_known, names is not None, *mine], float)
        if self._ranks.size > 1:
            vector = self._ranks.allreduce(vector, name="named_step")
        total, unknown, voters, ended, *votes = vector.tolist()
        chosen = tuple(name for name, ranks in zip(self._known, votes, strict=True) if ranks)
        is_equal = voters and all(ranks in (0, voters) for ranks in (ended, *votes))
        if unknown or not is_equal or begun not in (None, chosen):
            self._refuse(names, is_unknown=bool(unknown))
        if first and chosen == END:
            raise ValueError(f"{self._wanted()} Received: no yield on any rank.")
        return chosen, total

    def check(self, names: Chosen) -> None:
        """Raise ValueError on this rank, if it yields an unknown name."""
        if not set(names) <= set(self._known):
            raise ValueError(f"{self._wanted()} Received: {_shown(names)} on rank {self._ranks.world.rank}")

    def _wanted(self) -> str:
        return f"step must yield the name of an optimizer: {', '.join(map(repr, self._known))}."

    def _refuse(self, names: Chosen | None, *, is_unknown: bool) -> None:
        yields = self._ranks.allgather_object([self._ranks.world.rank, names], name="named_step.yields")
        received = ", ".join(f"{_shown(tuple(each))} on rank {rank}" for rank, each in yields if each is not None)
        if is_unknown:
            raise ValueError(f"{self._wanted()} Received: {received}")
        raise DesyncError(
            "step must yield the same names in the same order on every rank, and for every batch. If it chooses at "
            "random, draw from a generator of your own, with one seed on all ranks, such as random.Random(0): the "
            f"global ones differ between ranks. Received: {received}"
        )


def _shown(names: Chosen) -> str:
    return repr(names) if len(names) > 1 else ", ".join(map(repr, names)) or "the end"


def check_optimizers(optimizers: dict[str, Any]) -> None:
    """Raise ValueError or TypeError unless these are named optimizers with parameters of their own."""
    owner: dict[nn.Parameter, str] = {}
    if not optimizers:
        raise ValueError("optimizer must name at least one optimizer. Received: an empty dict")
    for name, optimizer in optimizers.items():
        if not isinstance(name, str) or "." in name or (not name and len(optimizers) > 1):
            raise ValueError(f"An optimizer's name must be a string without dots. Received: {name!r}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            named = f"optimizer[{name!r}]" if name else "optimizer"
            raise TypeError(f"{named} must be a torch.optim.Optimizer. Received: {optimizer!r}")
        for parameter in parameters_of(optimizer):
            if parameter in owner:
                shared = f"Received: one of shape {tuple(parameter.shape)} in {owner[parameter]!r} and {name!r}"
                raise ValueError(f"Each parameter must have one optimizer. {shared}")
            owner[parameter] = name
