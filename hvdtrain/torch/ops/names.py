"""A model's and an optimizer's tensors; names are without torch.compile's "_orig_mod."."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter


def plain(name: str) -> str:
    """Return the name that the tensor has in the model that was compiled, as a whole or in part."""
    return name.replace("_orig_mod.", "")


def parameters(model: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """Yield `model.named_parameters()` with plain names."""
    return ((plain(name), parameter) for name, parameter in model.named_parameters())


def buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield `model.named_buffers()` with plain names."""
    return ((plain(name), buffer) for name, buffer in model.named_buffers())


def parameters_of(optimizer: Any) -> list[Parameter]:
    """Return an optimizer's parameters, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
