"""Tensors that a loss takes: on this rank's device, and with labels that fit the outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvdtrain.torch.ops.device_copies import DeviceCopies, batch_dtype
from hvdtrain.torch.reduction.loss_weights import BY_CLASS, ELEMENTWISE


def check_shapes(loss: Any, outputs: Any, targets: Any, *, rank: int) -> None:
    """Raise ValueError for labels that would be broadcast (torch only warns), or classes that the model lacks."""
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return
    received = f"Received: outputs {tuple(outputs.shape)}, targets {tuple(targets.shape)} on rank {rank}"
    by_class = isinstance(loss, BY_CLASS)
    has_indices = by_class and not targets.is_floating_point()
    if (by_class or isinstance(loss, ELEMENTWISE)) and not has_indices and outputs.shape != targets.shape:
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


def as_tensor(
    value: Any, device: torch.device, dtype: torch.dtype | None = None, copies: DeviceCopies | None = None
) -> Any:
    """Return an array or tensor on `device`; float64 arrays, numpy's default, get `dtype` (torch's default)."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.asarray(value, order="C"))
        value = value.to(batch_dtype(value.dtype, dtype))
    if not isinstance(value, torch.Tensor):  # else an object that holds tensors, such as a PackedSequence
        return value.to(device) if hasattr(value, "to") else value
    if copies is not None and value.device.type == "cpu" and value.layout is torch.strided:
        return copies.to_device(value)
    return value.to(device, non_blocking=True)
