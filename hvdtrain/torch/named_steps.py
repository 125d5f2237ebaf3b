"""Ranks agree on which optimizer a step is for: on the names that the user's generators yield."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hvdtrain.distributed.world import World
from hvdtrain.errors import DesyncError

END = ""  # what a generator that has ended yields


class Names:
    """Exchanges what each rank yields, and what its loss divides by: one small allreduce a yield."""

    def __init__(self, names: Sequence[str], world: World) -> None:
        self._choices, self._world = [*names, END], world

    def agree(
        self, name: str | None, weight: float, begun: str | None = None, *, first: bool = False
    ) -> tuple[str, float]:
        """Return what all ranks yield, and the sum of their weights; a rank without samples has no name.

        `begun` is what the step's first batch has yielded, if this is another one. `first` is True for the first yield.

        Raises:
            ValueError: on every rank, if one yields an unknown name, or none yields anything.
            DesyncError: on every rank, if they yield different names.
        """
        mine = [float(name == choice) for choice in self._choices]
        unknown = float(name is not None and not any(mine))
        vector = np.array([weight, unknown, *mine])
        if self._world.size > 1:
            vector = self._world.allreduce(vector, name="named_step")
        total, unknown, *votes = vector.tolist()
        chosen = [choice for choice, ranks in zip(self._choices, votes, strict=True) if ranks]
        if unknown or len(chosen) != 1 or begun not in (None, chosen[0]):
            self._refuse(name, is_unknown=bool(unknown))
        if first and chosen == [END]:
            raise ValueError(f"{self._wanted()} Received: no yield on any rank.")
        return chosen[0], total

    def check(self, name: str) -> None:
        """Raise ValueError on this rank, if it yields an unknown name."""
        if name not in self._choices:
            raise ValueError(f"{self._wanted()} Received: {name!r} on rank {self._world.rank}")

    def _wanted(self) -> str:
        return f"step must yield the name of an optimizer: {', '.join(map(repr, self._choices[:-1]))}."

    def _refuse(self, name: str | None, *, is_unknown: bool) -> None:
        yields = self._world.allgather_object(name, name="named_step.yields")
        received = ", ".join(
            f"{repr(each) if each else 'the end'} on rank {rank}"
            for rank, each in enumerate(yields)
            if each is not None
        )
        if is_unknown:
            raise ValueError(f"{self._wanted()} Received: {received}")
        raise DesyncError(
            f"step must yield the same names in the same order on every rank, and for every batch. Received: {received}"
        )


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
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter in owner:
                shared = f"Received: one of shape {tuple(parameter.shape)} in {owner[parameter]!r} and {name!r}"
                raise ValueError(f"Each parameter must have one optimizer. {shared}")
            owner[parameter] = name
