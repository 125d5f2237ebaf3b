"""How much a rank's loss of a batch counts, so that the mean over ranks is the loss that one process would compute.

transformers divides some losses by `num_items_in_batch`, the number of labels in all batches of a step. Others are
means over the batch, whatever a model's signature promises: transformers' own ranks multiply their gradients by the
number of ranks. So the loss is tested: it is computed with the count, and with twice the count.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.distributed.world import World
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.steps.modes import Modes

log = logging.getLogger("hvdtrain")

Kind = Literal["mean", "sum"]  # over a batch; of a batch, divided by the count of labels of all ranks
_KINDS: tuple[Kind, Kind] = ("mean", "sum")
_UNKNOWN, _NEITHER = -1, 2
_CLOSE = 1e-4  # relative; a loss that is halved is halved in each bit, but for what a GPU adds up in another order


def weights_of(counts: NDArray[np.float64], rank: int) -> list[float]:
    """Return the factor for this rank's mean over each batch; the mean over ranks is then that over all samples.

    Args:
        counts: labels or samples of each rank and batch; shape (ranks, batches).
        rank: this rank.
    """
    totals = counts.sum(axis=0)
    shares = np.divide(counts[rank], totals, out=np.full(len(totals), 1 / len(counts)), where=totals > 0)
    return [float(weight) for weight in shares * len(counts)]


def kind_of(compute: Callable[..., torch.Tensor], model: Any, inputs: Any, items: Any, world: World) -> Kind | None:
    """Return the kind of a loss; None where its value cannot tell, such as zero, on all ranks. A collective.

    Raises:
        HvdTrainError: on all ranks, if a part of the loss is divided by the count, and another is not.
    """
    once, twice = _two_losses(compute, model, inputs, items)
    found = _compare(once, twice)
    everyones = {int(each) for each in world.allgather(np.array([found]), name="transformers.loss")} - {_UNKNOWN}
    if not everyones:
        return None
    if len(everyones) > 1 or _NEITHER in everyones:
        raise HvdTrainError(
            "A part of the loss is divided by num_items_in_batch and another is not, such as a router's auxiliary "
            "loss: ranks cannot add up to one process. Divide all of it, or none. Received: a loss of "
            f"{once:.6g}, and {twice:.6g} with twice the count, on rank {world.rank}"
        )
    return _KINDS[everyones.pop()]


def _two_losses(compute: Callable[..., torch.Tensor], model: Any, inputs: Any, items: Any) -> list[float]:
    """Compute the loss with the count and with twice the count; the model and random states stay as they are."""
    found = []
    with Modes(model, log.info).evaluating(), torch.no_grad():
        for count in (items, 2 * items):
            with torch.random.fork_rng():
                loss = compute(model, copy.copy(inputs), num_items_in_batch=count)
            found.append(float(loss.mean()))
    return found


def _compare(once: float, twice: float) -> int:
    if not (math.isfinite(once) and math.isfinite(twice)) or once == twice == 0.0:
        return _UNKNOWN
    if math.isclose(once, twice, rel_tol=_CLOSE):
        return _KINDS.index("mean")
    return _KINDS.index("sum") if math.isclose(once, 2 * twice, rel_tol=_CLOSE) else _NEITHER
