"""Metrics as sums that add up over batches and ranks, so that their means are exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.adapter import Reduce

Metric = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def named_metrics(metrics: Sequence[Any], loss: Any) -> dict[str, Metric]:
    """Return {name: function (outputs, targets) -> one value a sample or element, or one for the batch}.

    Raises:
        ValueError: a name that is not known.
        TypeError: neither a name nor a callable.
    """
    if isinstance(metrics, str):
        metrics = [metrics]
    known: dict[str, Metric] = {
        "accuracy": lambda outputs, targets: accuracy(outputs, targets, loss),
        "mse": lambda outputs, targets: (outputs - targets).square(),
        "mae": lambda outputs, targets: (outputs - targets).abs(),
    }
    found: dict[str, Metric] = {}
    for metric in metrics:
        if isinstance(metric, str):
            if metric not in known:
                raise ValueError(f"A metric must be one of {', '.join(known)} or a callable. Received: {metric!r}")
            found[metric] = known[metric]
        elif callable(metric):
            found[getattr(metric, "__name__", type(metric).__name__)] = metric
        else:
            raise TypeError(f"A metric must be a name or a callable (outputs, targets). Received: {metric!r}")
    return found


def accuracy(outputs: torch.Tensor, targets: torch.Tensor, loss: Any = None) -> torch.Tensor:
    """Return 1.0 where the prediction is right, 0.0 where not; targets that the loss ignores are left out.

    outputs: (batch, classes, ...) scores, with targets of class indices (batch, ...) or probabilities; or one binary
    score a target, of the targets' shape: a logit, or a probability where the loss is BCELoss.
    """
    if outputs.shape == targets.shape and not isinstance(loss, torch.nn.CrossEntropyLoss):
        threshold = 0.5 if isinstance(loss, torch.nn.BCELoss) else 0.0
        return ((outputs > threshold) == (targets > 0.5)).double()
    if targets.is_floating_point():
        targets = targets.argmax(1)
    right = (outputs.argmax(1) == targets).double()
    ignored = getattr(loss, "ignore_index", None)
    return right if ignored is None else right[targets != ignored]


class Totals:
    """Running (sum, count) of the loss and each metric, on the device: reading them is the only wait."""

    def __init__(self, metrics: dict[str, Metric], device: torch.device) -> None:
        self._metrics = metrics
        # float64: a mean over 10^7 samples keeps all its digits.
        self._sums = torch.zeros(1 + len(metrics), 2, dtype=torch.float64, device=device)

    def add(self, outputs: Any, targets: Any, loss: torch.Tensor, *, weight: float, per_batch: int) -> None:
        """Add a batch: its loss summed over what the loss counts, `weight` of them, and each metric's values.

        per_batch: the batch's samples, which a metric that gives one value for the batch stands for.
        """
        with torch.no_grad():
            self._sums[0, 0] += loss.detach().double()
            self._sums[0, 1] += weight
            for row, metric in enumerate(self._metrics.values(), start=1):
                values = torch.as_tensor(metric(outputs.detach(), targets)).double()
                scale = per_batch if values.dim() == 0 else 1
                self._sums[row, 0] += values.sum() * scale
                self._sums[row, 1] += values.numel() * scale

    def clear(self) -> None:
        """Start anew."""
        self._sums.zero_()

    def results(self, reduce: Reduce) -> dict[str, float]:
        """Return each mean over all ranks, and start anew."""
        sums = reduce(self._sums.cpu().numpy().reshape(-1).copy()).reshape(-1, 2)
        self.clear()
        names = ["loss", *self._metrics]
        return {
            name: float(total / count) if count else float("nan")
            for name, (total, count) in zip(names, sums, strict=True)
        }
