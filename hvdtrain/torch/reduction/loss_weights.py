"""Weigh the batches of a step, so that N ranks give the gradient of one process."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hvdtrain.data.sources import Batch
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import World
from hvdtrain.torch.reduction.weighted_mean import WeightedMean

ELEMENTWISE = tuple(vars(torch.nn)[f"{x}Loss"] for x in ("MSE", "L1", "SmoothL1", "Huber", "BCE", "BCEWithLogits"))
BY_CLASS = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)

# Class weights of losses as they were last read: the tensor, its version, its values.
_read: weakref.WeakKeyDictionary[Any, tuple[torch.Tensor, int, NDArray[np.float64]]] = weakref.WeakKeyDictionary()


class Counted(NamedTuple):
    """The weights of a batch in the loss and the metrics."""

    weight: float  # what the batch's mean loss was divided by, up to a factor that is the same for every batch
    factor: float  # makes the loss a sum: `weight`, or 1 for a loss that is a sum
    samples: int  # on this rank
    all_targets: bool  # True where it is known on the host that the loss ignores no target


def needs_exchange(loss: Any) -> bool:
    """True where the denominators of other ranks cannot be computed from sample counts alone."""
    return isinstance(loss, BY_CLASS) and loss.reduction == "mean"


def elementwise(loss: Any) -> bool:
    """True for torch's losses whose mean is one over elements."""
    return isinstance(loss, ELEMENTWISE)


def denominator(loss: Any, batch: Batch) -> tuple[float, bool]:
    """Return what the batch's mean loss was divided by, up to a common factor, and whether all targets count."""
    return divisor(loss, batch.targets, samples=batch.local_count)


def divisor(loss: Any, targets: Any, *, samples: int) -> tuple[float, bool]:
    """Return what a mean loss of these targets was divided by, and whether all targets count; see `denominator`."""
    count = float(samples)
    if not count or not needs_exchange(loss):
        return count, False
    if isinstance(targets, torch.Tensor) and not targets.is_floating_point():
        targets = targets.detach().cpu().numpy()  # where a small operation costs a third of torch's
    if isinstance(targets, torch.Tensor) or (targets := np.asarray(targets)).dtype.kind == "f":
        return count, True  # class probabilities: a mean over samples
    # Else torch divides by the class weights of the targets that are not ignored, which differ from rank to rank.
    kept = targets != loss.ignore_index
    count = float(np.count_nonzero(kept))
    if loss.weight is None:
        return count, count == targets.size
    return float(_class_weights(loss)[targets[kept]].sum()), count == targets.size


def _class_weights(loss: Any) -> NDArray[np.float64]:
    """Return a loss's class weights, which are read from their device only when they have changed."""
    weight: torch.Tensor = loss.weight
    version = -1 if weight.is_inference() else weight._version  # which those do not have
    known, read, values = _read.get(loss, (None, 0, None))
    if values is None or known is not weight or read != version or version < 0:
        values = weight.detach().cpu().double().numpy().copy()
        _read[loss] = (weight, version, values)
    return values


@contextmanager
def without_weight(module: nn.Module) -> Iterator[None]:
    """Within it, backward makes gradients of zeros, even if the loss is not finite."""
    # Not by a loss times 0: through SyncBatchNorm other ranks' gradients arrive in earlier layers.
    hooks = [each.register_hook(torch.zeros_like) for each in module.parameters() if each.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class LossWeights:
    """Weights of the batches' mean losses in a step, so that N ranks give the gradient of one process.

    With mean losses L of denominators d over batches k and ranks r, one process would minimise
    sum(d_rk * L_rk) / sum(d_rk). The optimizer averages over `size` DataRanks, so each loss is scaled by
    d_rk * size / sum(d). No rank knows how many labels others ignore: losses are scaled for the expected sum, the sum
    travels with the gradients, and the reducer scales them again in steps in which it was different.

    `loss` is None where a step of the user's own returns the denominators, batch by batch.
    """

    def __init__(self, loss: Any, world: World) -> None:
        self.counted: list[Counted] = []  # the denominator of each batch of the current step
        self.weight: float | None = None  # sum of this rank's denominators, if other ranks cannot know it; else None
        self.expected = 0.0  # the sum over all ranks for which losses are scaled
        # The largest weight of a sample so far, equal on all ranks. With the largest, gradients are never scaled up
        # before they are reduced, which float16 on the wire could not hold.
        self.per_sample = 0.0
        self.alone = False  # whether this rank's gradient is not reduced: see `Adapter.reduce_over`
        self._loss, self._ranks = loss, DataRanks(world)
        self._exchanged = loss is None or needs_exchange(loss)
        self._sums = getattr(loss, "reduction", "mean") == "sum"
        self._samples = 0  # of the step, over all ranks; over this one, if alone
        self._share = 1.0  # of this rank in the step's samples, times the number of ranks; 1 if not alone
        self._done = 0  # of the step's batches, those before backward

    def count(self, batch: Batch) -> Counted:
        """Return what counts of a batch."""
        weight, all_targets = denominator(self._loss, batch)
        return Counted(weight, 1.0 if self._sums else weight, batch.local_count, all_targets)

    def begin(self, batches: Sequence[Batch]) -> None:
        """Count a step's batches; every rank calls it, whether it holds samples or not."""
        self.counted = [self.count(batch) for batch in batches]
        self._done = 0
        self._counts = [batch.local_count if self.alone else batch.global_count for batch in batches]
        self._samples = sum(self._counts)
        if self.alone:
            self._share = self._samples * self._ranks.size / sum(batch.global_count for batch in batches)
        self.expected = float(self._samples)
        if not self._exchanged:
            return
        if self._loss is None:
            self.weight, self.expected = 0.0, self.per_sample * self._samples if self._has_peers else 0.0
            return
        self.weight = sum(each.weight for each in self.counted)
        self.expected = self.weight
        if self._has_peers:  # until labels have counted, no sum is known: exchange it
            self.expected = self.per_sample * self._samples or self._exchange(self.weight)

    def begin_open(self, samples: int) -> float | None:
        """Begin a step of up to so many samples, whose batches are counted one by one (`OpenStep`).

        Returns:
            The sum of all ranks' weights for which losses are scaled; None for losses that are sums.
        """
        self.counted, self._samples, self.alone = [], samples, False
        self.expected = (self.per_sample or 1.0) * samples if self._exchanged else float(samples)
        return None if self._sums else self.expected

    def expect(self, index: int, total: float | None = None) -> None:
        """Expect a sum before backward over batch `index`; every rank calls it after each forward of an own step.

        `total` is the sum over all ranks so far, if it is known.
        """
        self._done = index + 1
        if self._loss is not None or self.weight is None:
            return
        self.weight += self.counted[index].weight
        if total is not None and not index:
            self.expected = 0.0
        if not self.expected:  # on no rank: nothing has counted yet
            if total is None:
                total = self._exchange(self.weight) if self._has_peers else self.weight
            self.expected = total and total * self._samples / sum(self._counts[: index + 1])

    def give_up(self) -> None:
        """Count no more batches of this step, and take part in what other ranks exchange over them."""
        for index in range(self._done, len(self.counted)):
            self.counted[index] = self.counted[index]._replace(weight=0.0)
            self.expect(index)

    @property
    def _has_peers(self) -> bool:
        return self._ranks.size > 1 and not self.alone

    def _exchange(self, weight: float) -> float:
        return float(self._ranks.allreduce(np.array([weight]), name="loss_denominator")[0])

    def factor(self, index: int) -> float:
        """Return what the loss of batch `index`, which counts something, is multiplied by before backward."""
        size = self._ranks.size
        if self._sums:  # over samples: averaging over ranks is all that must be undone
            return float(size)
        return self.counted[index].weight * (self._share if self.alone else size) / self.expected

    def correct(self, parameters: Sequence[torch.Tensor]) -> None:
        """Scale gradients of one process or rank, which no reducer has scaled, for the sum of their step."""
        if self._loss is None and not self.alone:
            self.learn(self.weight)
        if (factor := WeightedMean((), self.weight, self.expected).correction(rounding=0.0)) != 1.0:
            for each in parameters:
                if each.grad is not None:
                    each.grad.mul_(factor)

    @property
    def samples(self) -> int:
        """The samples of the step, over all ranks; over this one, if alone."""
        return self._samples

    def learn(self, total: float | None, samples: int | None = None) -> None:
        """Learn from the sum that came with the gradients; `samples` are those of their step, None for this one."""
        samples = self._samples if samples is None else samples
        if total is not None and self._exchanged:
            if self._loss is None and not total:
                raise ValueError(
                    "Nothing counts in this step: step returned Loss.count=0 on every rank that holds samples. "
                    f"Received: {samples} samples over all ranks. Leave such batches out of the data."
                )
            # In float32, and perhaps divided and multiplied by the number of ranks: labels are whole.
            total = float(round(total)) if self._loss is not None and self._loss.weight is None else total
            self.per_sample = max(self.per_sample, total / samples)
