"""Clip gradients by their global norm, sparse ones too, which torch's own function does not take."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


@torch.no_grad()
def clip_norm(parameters: Iterable[nn.Parameter], largest: float) -> None:
    """Scale all gradients so that their global norm is at most `largest`, as `torch.nn.utils.clip_grad_norm_` does."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(parameter.grad.is_sparse for parameter in held):
        nn.utils.clip_grad_norm_(held, largest)
        return
    values = []
    for parameter in held:
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # entries of one place add up before they are squared
            values.append(parameter.grad.values())
        else:
            values.append(parameter.grad)
    norm = nn.utils.get_total_norm(values)
    for each in values:
        each.mul_((largest / (norm.to(each.device) + 1e-6)).clamp(max=1.0))
