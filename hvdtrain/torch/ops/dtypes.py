"""Tensors of every type that torch has, as arrays that NumPy and checkpoints know, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hvdtrain.checkpoint import Kind
from hvdtrain.torch.ops import divided, names


def _known(*wanted: str) -> list[torch.dtype]:
    return [getattr(torch, name) for name in wanted if hasattr(torch, name)]  # an older torch lacks some


_FLOAT8 = _known("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
# NumPy lacks these types. The wider type holds each of their numbers.
_WIDER = {**dict.fromkeys([torch.bfloat16, *_FLOAT8], torch.float32), torch.complex32: torch.complex64}
# torch computes nothing in these types, whose elements are bytes.
_BYTES = frozenset(_known("float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2"))
_NUMPYS = frozenset(
    _known("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
    + _known("float16", "float32", "float64", "complex64", "complex128")
)


def check(model: nn.Module, *, precision: str = "fp32", may_be_divided: bool = False) -> None:
    """Raise ValueError if a parameter or a buffer has a type or layout that cannot be trained or saved; names it.

    Args:
        model: the model.
        precision: the Trainer's.
        may_be_divided: whether torch may have divided tensors over the ranks of a Grid.
    """
    tensors: Iterable[tuple[str, Tensor]] = (*names.parameters(model), *names.buffers(model))
    if not may_be_divided:
        refuse_divided(tensors)
    for name, tensor in tensors:
        if tensor.dtype not in _NUMPYS and tensor.dtype not in _WIDER and tensor.dtype not in _BYTES:
            raise ValueError(
                f"A checkpoint cannot hold tensors of this type. Received: {name} of type {tensor.dtype}. Keep it as a "
                "plain attribute of its module, not as a parameter or a buffer, or convert it."
            )
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"Parameters and buffers must be dense. Received: {name} of layout {tensor.layout}. Keep it dense, or "
                "as a plain attribute of its module, which forward moves to the device."
            )
        if tensor.is_complex() and tensor.requires_grad and precision == "fp16":
            raise ValueError(
                f"torch's loss scaling takes no complex gradients. Received: precision='fp16', and {name} of type "
                f"{tensor.dtype}. Use precision='bf16' or 'fp32'."
            )


def refuse_divided(named: Iterable[tuple[str, Any]]) -> None:
    """Raise ValueError for a tensor that torch has divided over ranks (DTensor); names it."""
    for name, tensor in named:
        if divided.is_divided(tensor):
            raise ValueError(
                f"torch has divided {name} over {tensor.device_mesh}, and each rank has a part. Divide it over the "
                "mesh of a hvdtrain.torch.Grid, and give it to the Trainer, or step with the plain optimizer after "
                "grid.average_gradients(parameters)"
            )


def to_array(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as an array on the host, of its memory where possible, else of a type that holds its numbers."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    if tensor.dtype in _WIDER:
        tensor = tensor.to(_WIDER[tensor.dtype])
    return np.asarray((tensor.view(torch.uint8) if tensor.dtype in _BYTES else tensor).numpy())


def kind_on_host(tensor: Tensor) -> Kind:
    """Return the shape and type of the array that `to_array` makes of a tensor."""
    return Kind(tuple(tensor.shape), to_array(torch.empty(0, dtype=tensor.dtype, device="cpu")).dtype)


@torch.no_grad()
def copy_array(tensor: Tensor, array: NDArray[Any]) -> None:
    """Overwrite a tensor with what `to_array` returned."""
    target = tensor.view(torch.uint8) if tensor.dtype in _BYTES else tensor
    target.copy_(torch.from_numpy(array))


def as_numbers(value: Any) -> Tensor:
    """Return a tensor as it is, and anything else, such as a Python number, as float64 on the host."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64, device="cpu")


def can_combine(tensor: Tensor) -> bool:
    """Return whether values of this type have a mean or a maximum over ranks."""
    return tensor.dtype not in _BYTES


def rule(tensor: Tensor) -> str:
    """Return how ranks combine their values of such a buffer: "mean", or "max"."""
    return "mean" if tensor.is_floating_point() or tensor.is_complex() else "max"
