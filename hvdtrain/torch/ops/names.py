"""Names of a model's tensors as they are without torch.compile, which puts "_orig_mod." into them."""

from __future__ import annotations

from collections.abc import Iterator

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
