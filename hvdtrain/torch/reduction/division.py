"""Weights and gradients as the numbers that `Division` divides among ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from hvdtrain.distributed.division import Division
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.ops import engine

__all__ = ["Division", "flat", "flat_gradient", "laid_out"]


def flat(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's numbers in one dimension, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient in one dimension, in the order of the weight's memory."""
    if gradient.layout is not torch.strided:
        raise HvdTrainError(
            "With shards gradients must be dense. Received: a sparse gradient of a weight of shape "
            f"{tuple(parameter.shape)} on rank {engine.native().rank()}. Use Embedding(sparse=False), or no shards."
        )
    return flat(laid_out(parameter, gradient))


def laid_out(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a tensor whose numbers are in memory in the order of the parameter's."""
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
