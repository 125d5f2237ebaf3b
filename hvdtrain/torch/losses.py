"""What a batch's mean loss weighs in a step, so that N ranks give the gradient of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import hvdtrain.torch as hvd
from hvdtrain.data import Batch
from hvdtrain.world import World

_ELEMENTWISE = (
    torch.nn.MSELoss,
    torch.nn.L1Loss,
    torch.nn.SmoothL1Loss,
    torch.nn.HuberLoss,
    torch.nn.BCELoss,
    torch.nn.BCEWithLogitsLoss,
)
_BY_CLASS = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)


def denominator(loss: Any, batch: Batch) -> float:
    """Return what the batch's mean loss was divided by, up to a factor that is the same for every batch.

    That is the number of samples, except for losses over classes: they divide by the summed class weights of the
    targets that are not ignored (torch.nn.CrossEntropyLoss), which differ from rank to rank.
    """
    if not batch.local_count:
        return 0.0
    if not needs_exchange(loss):
        return float(batch.local_count)
    targets = torch.as_tensor(batch.targets).detach().cpu()
    if targets.is_floating_point():  # class probabilities: a mean over samples
        return float(batch.local_count)
    kept = targets[targets != loss.ignore_index].long()
    return float(kept.numel() if loss.weight is None else loss.weight.detach().cpu().double()[kept].sum())


def needs_exchange(loss: Any) -> bool:
    """True where the denominators of other ranks cannot be computed from sample counts alone."""
    return isinstance(loss, _BY_CLASS) and loss.reduction == "mean"


class StepWeights:
    """The factors of one optimizer step's losses.

    With mean losses L of denominators d over batches k and ranks r, one process would minimise
    sum(d_rk * L_rk) / sum(d_rk). The optimizer averages over `size` ranks, so each loss is scaled by
    d_rk * size / sum(d). Where the sum must be exchanged it travels while the forward pass runs.
    """

    def __init__(self, batches: Sequence[Batch], loss: Any, world: World) -> None:
        self.denominators = [denominator(loss, batch) for batch in batches]
        self._size = world.size
        self._sums = getattr(loss, "reduction", "mean") == "sum"
        self._handle: Any = None
        self._total = float(sum(batch.global_count for batch in batches))
        if needs_exchange(loss):
            self._total = sum(self.denominators)
            if self._size > 1:
                total = torch.tensor([self._total], dtype=torch.float64)
                self._handle = hvd.allreduce_async(total, op=hvd.Sum, name="hvdtrain.loss_denominator")

    def finish(self) -> None:
        """Wait for the exchange; every rank calls it in every step, whether it holds samples or not."""
        if self._handle is not None:
            self._total = float(hvd.synchronize(self._handle)[0])
            self._handle = None

    def total_loss(self, index: int, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of `batches[index]` summed over what it counts: samples, or the targets' class weights."""
        return loss if self._sums else loss * self.denominators[index]

    def factor(self, index: int) -> float:
        """Return what the loss of `batches[index]` is multiplied by before backward."""
        self.finish()
        if self._sums:  # a sum over samples: averaging over ranks is all that must be undone
            return float(self._size)
        return self.denominators[index] * self._size / self._total


def check_shapes(loss: Any, outputs: Any, targets: Any, *, rank: int) -> None:
    """Raise ValueError for labels whose shape would be broadcast, or classes that the model does not have.

    torch only warns when MSELoss broadcasts (n,) against (n, 1), and the loss is then a wrong number.
    """
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return
    received = f"Received: outputs {tuple(outputs.shape)}, targets {tuple(targets.shape)} on rank {rank}"
    if isinstance(loss, _ELEMENTWISE) and outputs.shape != targets.shape:
        raise ValueError(f"{type(loss).__name__} needs targets of the outputs' shape. {received}")
    if not isinstance(loss, _BY_CLASS):
        return
    if targets.is_floating_point():
        if outputs.shape != targets.shape:
            raise ValueError(f"Class probabilities must have the outputs' shape. {received}")
        return
    expected = outputs.shape[:1] + outputs.shape[2:]
    if targets.shape != expected:
        raise ValueError(
            f"{type(loss).__name__} needs class indices of shape {tuple(expected)}, the outputs' without axis 1. "
            f"{received}"
        )
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
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    return value
