"""What a batch weighs in a step and in metrics, so that N ranks give the gradient and the means of one process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.adapter import Reduce
from hvdtrain.data.sources import Batch
from hvdtrain.distributed.world import World

_ELEMENTWISE = tuple(vars(torch.nn)[f"{x}Loss"] for x in ("MSE", "L1", "SmoothL1", "Huber", "BCE", "BCEWithLogits"))
_BY_CLASS = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)

Metric = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Class weights of losses as they were last read: the tensor, its version, its values.
_read: weakref.WeakKeyDictionary[Any, tuple[torch.Tensor, int, NDArray[np.float64]]] = weakref.WeakKeyDictionary()


class Counted(NamedTuple):
    """What counts of a batch in its loss and metrics."""

    weight: float  # what the batch's mean loss was divided by, up to a factor that is the same for every batch
    factor: float  # makes the loss a sum: `weight`, or 1 for a loss that is a sum
    samples: int  # on this rank
    all_targets: bool  # True where it is known on the host that the loss ignores no target


def needs_exchange(loss: Any) -> bool:
    """True where the denominators of other ranks cannot be computed from sample counts alone."""
    return isinstance(loss, _BY_CLASS) and loss.reduction == "mean"


def denominator(loss: Any, batch: Batch) -> tuple[float, bool]:
    """Return what the batch's mean loss was divided by, up to a common factor, and whether all targets count."""
    count = float(batch.local_count)
    targets = batch.targets
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


class LossWeights:
    """Weights of the batches' mean losses in a step, so that N ranks give the gradient of one process.

    With mean losses L of denominators d over batches k and ranks r, one process would minimise
    sum(d_rk * L_rk) / sum(d_rk). The optimizer averages over `size` ranks, so each loss is scaled by
    d_rk * size / sum(d). No rank knows how many labels others ignore: losses are scaled for the expected sum, the sum
    travels with the gradients, and the reducer scales them again in steps in which it was different.
    """

    def __init__(self, loss: Any, world: World) -> None:
        self.counted: list[Counted] = []  # the denominator of each batch of the current step
        self.weight: float | None = None  # sum of this rank's denominators, if other ranks cannot know it; else None
        self.expected = 0.0  # the sum over all ranks for which losses are scaled
        # The largest weight of a sample so far, equal on all ranks. With the largest, gradients are never scaled up
        # before they are reduced, which float16 on the wire could not hold.
        self.per_sample = 0.0
        self._loss, self._world = loss, world
        self._exchanged = needs_exchange(loss)
        self._sums = getattr(loss, "reduction", "mean") == "sum"
        self._samples = 0  # of the step, over all ranks

    def count(self, batch: Batch) -> Counted:
        """Return what counts of a batch."""
        weight, all_targets = denominator(self._loss, batch)
        return Counted(weight, 1.0 if self._sums else weight, batch.local_count, all_targets)

    def begin(self, batches: Sequence[Batch]) -> None:
        """Count a step's batches; every rank calls it, whether it holds samples or not."""
        self.counted = [self.count(batch) for batch in batches]
        self._samples = sum(batch.global_count for batch in batches)
        self.expected = float(self._samples)
        if not self._exchanged:
            return
        self.weight = sum(each.weight for each in self.counted)
        self.expected = self.weight
        if self._world.size > 1:  # until labels have counted, no sum is known: exchange it
            self.expected = self.per_sample * self._samples or self._exchange(self.weight)

    def _exchange(self, weight: float) -> float:
        return float(self._world.allreduce(np.array([weight]), name="loss_denominator")[0])

    def factor(self, index: int) -> float:
        """Return what the loss of batch `index`, which counts something, is multiplied by before backward."""
        size = self._world.size
        # A sum over samples: averaging over ranks is all that must be undone.
        return float(size) if self._sums else self.counted[index].weight * size / self.expected

    def learn(self, total: float | None) -> None:
        """Learn from the sum that came with the gradients."""
        if total is not None:
            # In float32, and perhaps divided and multiplied by the number of ranks: counts are whole.
            total = float(round(total)) if self._loss.weight is None else total
            self.per_sample = max(self.per_sample, total / self._samples)


def check_shapes(loss: Any, outputs: Any, targets: Any, *, rank: int) -> None:
    """Raise ValueError for labels that would be broadcast (torch only warns), or classes that the model lacks."""
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return
    received = f"Received: outputs {tuple(outputs.shape)}, targets {tuple(targets.shape)} on rank {rank}"
    by_class = isinstance(loss, _BY_CLASS)
    has_indices = by_class and not targets.is_floating_point()
    if (by_class or isinstance(loss, _ELEMENTWISE)) and not has_indices and outputs.shape != targets.shape:
        raise ValueError(f"{type(loss).__name__} needs targets (or probabilities) of the outputs' shape. {received}")
    if not has_indices:
        return
    expected = outputs.shape[:1] + outputs.shape[2:]
    if targets.shape != expected:
        needs = f"needs class indices of shape {tuple(expected)}, the outputs' without axis 1"
        raise ValueError(f"{type(loss).__name__} {needs}. {received}")
    kept = targets[targets != loss.ignore_index]
    low, high = (int(kept.min()), int(kept.max())) if kept.numel() else (0, 0)
    if not 0 <= low <= high < outputs.shape[1]:
        raise ValueError(
            f"Class indices must be in [0, {outputs.shape[1]}). Received: {low} to {high} on rank {rank}. "
            "Give the model as many outputs as there are classes."
        )


def as_tensor(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return an array or tensor on `device`; float64 arrays, numpy's default, get `dtype` (torch's default)."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.asarray(value, order="C"))
        if value.dtype == torch.float64:
            value = value.to(dtype or torch.get_default_dtype())
    if not isinstance(value, torch.Tensor):
        return value
    if device.type == "cuda" and value.device.type == "cpu" and value.layout is torch.strided:
        value = value.pin_memory()  # from other memory the host waits until the device has come to the copy
    return value.to(device, non_blocking=True)


def named_metrics(metrics: Sequence[Any], loss: Any) -> dict[str, Metric]:
    """Return {name: function (outputs, targets) -> one value per sample or element, or one for the batch}."""
    known: dict[str, Metric] = {
        "accuracy": Accuracy(loss),
        "mse": lambda outputs, targets: (outputs - targets).square(),
        "mae": lambda outputs, targets: (outputs - targets).abs(),
    }
    found: dict[str, Metric] = {}
    for metric in [metrics] if isinstance(metrics, str) else metrics:
        if isinstance(metric, str) and metric in known:
            found[metric] = known[metric]
        elif callable(metric):
            found[getattr(metric, "__name__", type(metric).__name__)] = metric
        else:
            error = ValueError if isinstance(metric, str) else TypeError
            raise error(f"A metric must be one of {', '.join(known)}, or a callable. Received: {metric!r}")
    return found


class Accuracy:
    """Whether each prediction is correct: of scores (batch, classes, ...) for class indices or probabilities.

    Outputs of the targets' shape are binary scores: logits, or probabilities if the loss is BCELoss.
    """

    def __init__(self, loss: Any = None) -> None:
        self._has_classes = isinstance(loss, torch.nn.CrossEntropyLoss)
        self._threshold = 0.5 if isinstance(loss, torch.nn.BCELoss) else 0.0
        self._ignored = getattr(loss, "ignore_index", None)

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return one value per target, also for ignored targets."""
        if outputs.shape == targets.shape and not self._has_classes:
            return (outputs > self._threshold) == (targets > 0.5)
        if targets.is_floating_point():
            targets = targets.argmax(1)
        return outputs.argmax(1) == targets

    def mask(self, values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """Return which of the values count; None if all do."""
        return None if self._ignored is None or values.shape != targets.shape else targets != self._ignored


class Totals:
    """Running sum and count of the loss and each metric. Sums stay on the device; only `numbers` waits for it."""

    def __init__(self, metrics: dict[str, Metric], device: torch.device) -> None:
        self._metrics = metrics
        # float64, so that a mean over 10^7 samples loses no digits.
        self.sums = torch.zeros(2, 1 + len(metrics), dtype=torch.float64, device=device)
        # Counts of masked values are on the device; all other counts are on the host.
        self._cells, self._masked_counts = (row.unbind() for row in self.sums)
        self.counts = [0.0] * len(self._cells)

    def add(self, outputs: Any, targets: Any, loss: torch.Tensor, counted: Counted) -> None:
        """Add a batch: its loss, a scalar, and each metric's values."""
        self._cells[0].add_(loss.detach(), alpha=counted.factor)
        self.counts[0] += counted.weight
        if not self._metrics:
            return
        with torch.no_grad():
            outputs = outputs.detach() if isinstance(outputs, torch.Tensor) else outputs
            for row, metric in enumerate(self._metrics.values(), start=1):
                values = torch.as_tensor(metric(outputs, targets))
                mask = None
                if isinstance(metric, Accuracy) and not counted.all_targets:
                    mask = metric.mask(values, targets)
                if mask is not None:
                    # A mask, not an index: for an index the host would wait for the number of values.
                    self._cells[row].add_((values & mask).sum(dtype=torch.float64))
                    self._masked_counts[row].add_(mask.sum(dtype=torch.float64))
                elif values.dim():
                    self._cells[row].add_(values.sum(dtype=torch.float64))
                    self.counts[row] += values.numel()
                else:
                    self._cells[row].add_(values, alpha=counted.samples)
                    self.counts[row] += counted.samples

    @property
    def numbers(self) -> NDArray[np.float64]:
        """The sums, then the counts; assigning restores them."""
        sums, masked_counts = self.sums.cpu().numpy()
        return np.concatenate([sums, masked_counts + self.counts])

    @numbers.setter
    def numbers(self, numbers: NDArray[np.float64]) -> None:
        sums, counts = numbers.reshape(2, -1)
        self.sums.zero_()[0].copy_(torch.from_numpy(sums))
        self.counts = counts.tolist()

    def clear(self) -> None:
        """Reset the metric."""
        self.sums.zero_()
        self.counts = [0.0] * len(self._cells)

    def means(self, reduce: Reduce) -> dict[str, float]:
        """Return each mean over all ranks."""
        sums, counts = reduce(self.numbers).reshape(2, -1)
        means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts != 0)
        return dict(zip(["loss", *self._metrics], means.tolist(), strict=True))
