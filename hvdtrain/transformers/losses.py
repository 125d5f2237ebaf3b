"""How much a rank's loss of a batch counts, so that the mean over ranks is the loss that one process would compute.

transformers divides some losses by `num_items_in_batch`, the number of labels in all batches of a step. Others are
means over the batch, whatever a model's signature promises: transformers' own ranks multiply their gradients by the
number of ranks. So the loss is tested: it is computed with the count, and with twice the count. A mean is computed of
two parts of the batch, too, because it may be over labels, or over samples.
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

# A mean over a batch's labels; over its samples; over its labels but the first of each sample, as a language model's; a
# sum that is divided by the count of all ranks' labels. A mean has the place of its count in `Counts`.
Kind = Literal["labels", "samples", "shifted", "sum"]
_KINDS: tuple[Kind, ...] = ("labels", "samples", "shifted", "sum")
_SUM, _ANY_MEAN, _UNKNOWN = 0b1000, 0b0111, 0b1111  # sets of kinds, by their bits

Counts = tuple[float, float, float]  # of a batch: labels, samples, labels but the first of each sample

_CLOSE = 1e-4  # relative; a loss that is halved is halved in each bit, but for what a GPU adds up in another order
_EXACT = 1e-5  # relative; of two parts' mean and the whole batch's, in float32


def weights_of(counts: NDArray[np.float64], rank: int) -> list[float]:
    """Return the factor for this rank's mean over each batch; the mean over ranks is then that over all samples.

    Args:
        counts: labels or samples of each rank and batch; shape (ranks, batches).
        rank: this rank.
    """
    totals = counts.sum(axis=0)
    shares = np.divide(counts[rank], totals, out=np.full(len(totals), 1 / len(counts)), where=totals > 0)
    return [float(weight) for weight in shares * len(counts)]


def kind_of(
    compute: Callable[..., Any], model: Any, inputs: Any, items: Any, world: World, count: Callable[[Any], Counts]
) -> Kind | None:
    """Return the kind of a loss; None where its value cannot tell, such as zero, on all ranks. A collective.

    Args:
        compute: `Trainer.compute_loss`; every rank calls it equally often.
        model: the model.
        inputs: the batch.
        items: `num_items_in_batch`; None if the loss does not get it.
        world: the ranks.
        count: counts a batch.

    Raises:
        HvdTrainError: on all ranks, if a part of the loss is divided by the count, and another is not.
    """
    parts = _parts(inputs, count)
    has_parts = world.allreduce(np.array([bool(parts)], np.int32), "max", name="transformers.parts")[0]
    if items is None and not has_parts:
        return "labels"
    with Modes(model, log.info).evaluating(), torch.no_grad():
        once = _value(compute, model, inputs, items)
        kinds = _ANY_MEAN if items is None else _compare(once, _value(compute, model, inputs, 2 * items))
        if has_parts:
            values = [_value(compute, model, part, items) for part, _ in parts or 2 * [(inputs, None)]]
            if parts and kinds == _ANY_MEAN:
                kinds = _means_of(once, values, [counts for _, counts in parts])
    everyones = int(np.bitwise_and.reduce(world.allgather(np.array([kinds]), name="transformers.loss")))
    if not everyones:
        raise HvdTrainError(
            "A part of the loss is divided by num_items_in_batch and another is not, such as a router's auxiliary "
            "loss, or ranks have other losses: they cannot add up to one process. Divide all of it, or none. Received: "
            f"a loss of {once:.6g} on rank {world.rank}"
        )
    return None if everyones == _UNKNOWN else next(kind for i, kind in enumerate(_KINDS) if everyones >> i & 1)


def _value(compute: Callable[..., Any], model: Any, inputs: Any, items: Any) -> float:
    """Compute a loss; random states stay as they are."""
    with torch.random.fork_rng():
        return float(compute(model, copy.copy(inputs), num_items_in_batch=items).mean())


def _compare(once: float, twice: float) -> int:
    """Return the kinds that a loss may have which was computed with the count of labels, and with twice the count."""
    if not (math.isfinite(once) and math.isfinite(twice)) or once == twice == 0.0:
        return _UNKNOWN
    if math.isclose(once, twice, rel_tol=_CLOSE):
        return _ANY_MEAN
    return _SUM if math.isclose(once, 2 * twice, rel_tol=_CLOSE) else 0


def _parts(inputs: Any, count: Callable[[Any], Counts]) -> list[tuple[Any, Counts]]:
    """Return a batch's first sample and its others, with their counts.

    None of them if counts are in proportion, so that all means are one, or if the batch cannot be cut, or is computed
    too roughly.
    """
    tensors = [each for each in inputs.values() if isinstance(each, torch.Tensor)]
    samples = {each.shape[0] if each.ndim else 0 for each in tensors}
    if len(samples) != 1 or (size := samples.pop()) < 2 or torch.is_autocast_enabled(tensors[0].device.type):
        return []
    cut = [
        {name: each[which] if isinstance(each, torch.Tensor) else each for name, each in inputs.items()}
        for which in (slice(1), slice(1, None))
    ]
    first, others = (count(each) for each in cut)
    is_even = all(one * (size - 1) == rest for one, rest in zip(first, others, strict=True))
    return [] if is_even else [(cut[0], first), (cut[1], others)]


def _means_of(once: float, values: list[float], counts: list[Counts]) -> int:
    """Return the kinds that a batch's mean may have, by the means of its parts; any of them if it has none of these."""
    found = 0
    for i, weights in enumerate(zip(*counts, strict=True)):
        terms = [value * weight for value, weight in zip(values, weights, strict=True) if weight]
        found |= bool(terms) and math.isclose(once, sum(terms) / sum(weights), rel_tol=_EXACT) and 1 << i
    return found or _ANY_MEAN
