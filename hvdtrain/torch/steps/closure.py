"""Steps of an optimizer that needs a closure, such as LBFGS: it evaluates loss and gradient as often as it likes."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import World
from hvdtrain.errors import DesyncError


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` of a plain optimizer needs a closure that computes loss and gradient, as LBFGS's does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def search(optimizer: Any, evaluate: Callable[[bool], float], world: World) -> None:
    """Take a step; ranks evaluate equally often, because each call gives all of them the same gradient and mean loss.

    `evaluate(again)` goes forward and backward over the step's batches, reduces, and returns this rank's loss; its
    mean over ranks is what the optimizer gets. The caller keeps the optimizer itself from reducing.
    """
    numbers, ranks = itertools.count(), DataRanks(world)

    @torch.enable_grad()
    def closure() -> torch.Tensor:
        again = next(numbers) > 0
        if again:
            _agree(again=True, world=world)
        loss = np.array([evaluate(again)])
        if ranks.size > 1:
            loss = ranks.allreduce(loss, "mean", name="closure.loss")
        return torch.from_numpy(loss)[0]

    optimizer.step(closure)
    _agree(again=False, world=world)


def _agree(*, again: bool, world: World) -> None:
    """Raise DesyncError on every rank, unless all of them evaluate again, or none."""
    if world.size > 1 and world.allreduce(np.array([again]) * 1.0, "mean", name="closure")[0] != again:
        raise DesyncError(
            "Ranks evaluate a step's loss a different number of times: their weights differ, or the arithmetic of "
            f"their devices. Received: {'one more' if again else 'no more'} on rank {world.rank}. Use equal "
            "hosts, or an optimizer that needs no closure."
        )
