"""Metrics of the Trainer's steps in PyTorch, exact over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.adapter import Reduce
from hvdtrain.data.trees import leaves, num_rows, tree_map
from hvdtrain.distributed.world import World
from hvdtrain.torch.ops.dtypes import as_numbers
from hvdtrain.torch.reduction.loss_weights import Counted
from hvdtrain.torch.steps.stateful_metrics import StatefulMetrics, is_stateful

_TOTALS = "sum.totals"

Metric = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def named_metrics(metrics: Any, loss: Any) -> dict[str, Any]:
    """Return the metrics by name: functions (outputs, targets) -> one value per sample or element, or objects."""
    known: dict[str, Metric] = {
        "accuracy": Accuracy(loss),
        "mse": lambda outputs, targets: (outputs - targets).square(),
        "mae": lambda outputs, targets: (outputs - targets).abs(),
    }
    found: dict[str, Any] = {}
    single = isinstance(metrics, str) or callable(metrics) or is_stateful(metrics)
    pairs = (
        metrics.items()
        if isinstance(metrics, Mapping)
        else ((None, each) for each in ([metrics] if single else metrics))
    )
    for given, metric in pairs:
        if isinstance(metric, str) and metric in known:
            name, metric = given or metric, known[metric]
        elif isinstance(metric, type) or not (callable(metric) or is_stateful(metric)):
            error = ValueError if isinstance(metric, str) else TypeError
            kinds = f"one of {', '.join(known)}, a callable, or an object with update, compute and reset"
            raise error(f"A metric must be {kinds}. Received: {metric!r}")
        else:
            name = given or getattr(metric, "__name__", type(metric).__name__)
        if name in found or name == "loss":
            raise ValueError(
                f"Each metric needs a name of its own: give a dict, {{name: metric}}. Received: {name} twice"
            )
        found[name] = metric
    return found


class Accuracy:
    """Accuracy: true for each correct prediction, of scores (batch, classes, ...) for class indices or probabilities.

    Outputs of the targets' shape are binary scores: logits, or probabilities if the loss is BCELoss. Without a loss, in
    a step of the user's own, classes may also be on the last axis, and targets of -100 are ignored.
    """

    def __init__(self, loss: Any = None) -> None:
        self._has_classes = isinstance(loss, torch.nn.CrossEntropyLoss)
        self._threshold = 0.5 if isinstance(loss, torch.nn.BCELoss) else 0.0
        self._ignored = -100 if loss is None else getattr(loss, "ignore_index", None)
        self._has_loss = loss is not None
        self._axis: int | None = None  # of classes, once a batch has shown it

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return one value per target, also for ignored targets."""
        if outputs.shape == targets.shape and not self._has_classes:
            return (outputs > self._threshold) == (targets > 0.5)
        if targets.is_floating_point():
            targets = targets.argmax(1)
        if self._has_loss:
            return outputs.argmax(1) == targets
        self._axis = _class_axis(outputs, targets, known=self._axis)
        return outputs.argmax(self._axis) == targets

    def mask(self, values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """Return which of the values count; None if all do."""
        return None if self._ignored is None or values.shape != targets.shape else targets != self._ignored


def _class_axis(outputs: torch.Tensor, targets: torch.Tensor, *, known: int | None) -> int:
    """Return the axis of classes: 1 as torch's losses take them, or the last as many models return them.

    A batch with as many targets a sample as classes does not show which one it is: then it is the `known` one.
    """
    is_second = outputs.shape[:1] + outputs.shape[2:] == targets.shape
    is_last = outputs.shape[:-1] == targets.shape
    is_ambiguous = is_second and is_last and outputs.dim() != 2
    if is_ambiguous and known is not None:
        return known
    if is_ambiguous or not (is_second or is_last):
        raise ValueError(
            "accuracy needs outputs (batch, classes, ...) or (batch, ..., classes) for targets (batch, ...). Received: "
            f"outputs {tuple(outputs.shape)}, targets {tuple(targets.shape)}. Return outputs.reshape(-1, classes) and "
            "targets.reshape(-1) from step."
        )
    return 1 if is_second else -1


class Totals:
    """Running sum and count of the loss and each metric. Sums stay on the device; only `numbers` waits for it."""

    def __init__(
        self, metrics: Mapping[str, Any], device: torch.device, world: World, losses: Sequence[str] = ("loss",)
    ) -> None:
        self._losses, self._names = list(losses), ", ".join([*losses, *metrics])
        self.stateful = StatefulMetrics({n: each for n, each in metrics.items() if is_stateful(each)}, device, world)
        self._metrics: dict[str, Metric] = {n: each for n, each in metrics.items() if not is_stateful(each)}
        self._has_metrics, self._rank = bool(metrics), world.rank
        # float64, so that a mean over 10^7 samples loses no digits.
        self.sums = torch.zeros(2, len(losses) + len(self._metrics), dtype=torch.float64, device=device)
        # Counts of masked values are on the device; all other counts are on the host.
        self._cells, self._masked_counts = (row.unbind() for row in self.sums)
        self.counts = [0.0] * len(self._cells)

    def add(
        self, outputs: Any, targets: Any, loss: torch.Tensor, counted: Counted, losses: Sequence[str] = ("loss",)
    ) -> None:
        """Add a batch: its loss, a scalar, under each of its names, and each metric's values, if there are outputs."""
        for row in map(self._losses.index, losses if counted.weight else ()):
            self._cells[row].add_(loss.detach().to(self.sums.device), alpha=counted.factor)
            self.counts[row] += counted.weight
        if not self._has_metrics or outputs is None or not (counted.weight or num_rows(outputs)):
            return
        with torch.no_grad():
            outputs = tree_map(lambda each: each.detach() if isinstance(each, torch.Tensor) else each, outputs)
            for row, (name, metric) in enumerate(self._metrics.items(), start=len(self._losses)):
                values = as_numbers(metric(outputs, targets)).to(self.sums.device)
                self._check_values(name, values, outputs, targets, samples=counted.samples)
                mask = None
                if isinstance(metric, Accuracy) and not counted.all_targets:
                    mask = metric.mask(values, targets.to(self.sums.device))
                if mask is None:
                    self._cells[row].add_(values.sum(dtype=torch.float64))
                    self.counts[row] += values.numel()
                else:
                    # A mask, not an index: for an index the host would wait for the number of values.
                    self._cells[row].add_((values & mask).sum(dtype=torch.float64))
                    self._masked_counts[row].add_(mask.sum(dtype=torch.float64))
            self.stateful.update(outputs, targets)

    def _check_values(self, name: str, values: torch.Tensor, outputs: Any, targets: Any, *, samples: int) -> None:
        """Raise ValueError unless a function has returned one value per sample or element."""
        if not values.dim() and samples != 1:
            raise ValueError(self._one_number(name, samples))
        shapes = [tuple(leaf.shape) for leaf in leaves((outputs, targets)) if hasattr(leaf, "shape")]
        rows = num_rows(outputs)
        # A mean over the batch as an array of one number; or a column less a row, which torch makes a square of.
        is_one = rows > 1 and values.numel() % rows != 0
        is_broadcast = bool(shapes) and values.numel() > max(math.prod(shape) for shape in shapes)
        if is_one or is_broadcast:
            advice = "Give targets the shape of the outputs" if is_broadcast else "Return the values before the mean"
            raise ValueError(
                "A metric (outputs, targets) must return one value per sample or element. Received: shape "
                f"{tuple(values.shape)} from {name}, for outputs and targets of {' and '.join(map(str, shapes))}, on "
                f"rank {self._rank}. {advice}."
            )

    def _one_number(self, name: str, samples: int) -> str:
        return (
            "A metric (outputs, targets) must return one value per sample or element: only then is the mean over all "
            f"samples exact. Received: one number for a batch of {samples} from {name}, on rank {self._rank}. Return "
            "the values before the mean. If the metric is not a mean over samples, use one with a state, such as "
            "torchmetrics.F1Score."
        )

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

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return what this rank has counted, for its part of a checkpoint."""
        return {f"{_TOTALS}.{self._names}": self.numbers} | self.stateful.arrays()

    def load(self, held: Mapping[str, NDArray[Any]]) -> bool:
        """Restore what `arrays` returned; return whether it is there. ValueError if it is of other metrics."""
        for name, numbers in held.items():
            if name.startswith(_TOTALS):
                names = name.removeprefix(_TOTALS)[1:]  # an older checkpoint's are not known
                if (names or self._names) != self._names or len(numbers) != 2 * len(self.counts):
                    raise ValueError(
                        f"The checkpoint was saved within an epoch that counted {names or 'other metrics'}. Received: "
                        f"{self._names}. Resume with the same metrics, or from a checkpoint of an epoch's end."
                    )
                self.numbers = numbers
                self.stateful.load(held)
                return True
        return False

    def clear(self) -> None:
        """Reset the metrics."""
        self.sums.zero_()
        self.counts = [0.0] * len(self._cells)
        self.stateful.clear()

    def results(self, reduce: Reduce, *, live: bool = False) -> dict[str, float]:
        """Return each metric over all ranks; with `live`, those that are cheap to reduce."""
        mine = self.numbers
        totals = reduce(np.concatenate([mine, self.stateful.numbers]))
        sums, counts = totals[: len(mine)].reshape(2, -1)
        means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts != 0)
        found = dict(zip([*self._losses, *self._metrics], means.tolist(), strict=True))
        return found | self.stateful.results(totals[len(mine) :], taken=found, live=live)
