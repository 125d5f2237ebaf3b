"""Clip gradients by their global norm, sparse ones too, which torch's own function does not take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hvdtrain.torch.ops.sparse import gradient_values
from hvdtrain.torch.reduction.grid_part import GridPart
from hvdtrain.torch.reduction.tensors import Whole


@torch.no_grad()
def clip_norm(parameters: Sequence[nn.Parameter], largest: float, tensors: Whole) -> None:
    """Scale all gradients so that their global norm is at most `largest`, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        parameters: those of `tensors`, with their gradients.
        largest: the norm.
        tensors: says whether these are all of the weights.
    """
    if isinstance(tensors, GridPart):
        tensors.clip(parameters, largest)
        return
    if not any(p.grad is not None and p.grad.is_sparse for p in parameters):
        norm = tensors.norm(_norm([p.grad for p in parameters if p.grad is not None], parameters[0].device))
        nn.utils.clip_grads_with_norm_(parameters, largest, norm)
        return
    values = [gradient_values(each) for each in parameters if each.grad is not None]
    norm = _norm(values, parameters[0].device)
    for each in values:
        each.mul_((largest / (norm.to(each.device) + 1e-6)).clamp(max=1.0))


def _norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the norm; of no gradients torch would return a zero of its default type on its default device."""
    return nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), dtype=torch.float32, device=device)
