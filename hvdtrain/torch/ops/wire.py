"""Make tensors contiguous, and of a type that Horovod knows, to send them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvdtrain.torch.ops import divided

# What horovod.torch 0.28.1 adds up; narrower floats travel as float32, which also adds them up better.
REDUCED = {torch.float16, torch.float32, torch.float64, torch.int32, torch.int64}
_SMALL_INTEGERS = (torch.uint8, torch.int8, torch.int16)
_REDUCED_AS = {torch.bfloat16: torch.float32, **dict.fromkeys(_SMALL_INTEGERS, torch.int32)}
_MOVED = {*REDUCED, *_SMALL_INTEGERS}
_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def reduced_as(dtype: torch.dtype) -> torch.dtype:
    """Return the type as which numbers of a type travel to be added up: `dtype` where Horovod knows it."""
    return _REDUCED_AS.get(dtype, dtype)


def as_real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, of the same memory if possible; other tensors as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def from_real(real: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `as_real` made of a tensor of `dtype`, as that type again."""
    return (torch.view_as_complex(real) if dtype.is_complex else real).to(dtype)


def is_native(tensor: Tensor) -> bool:
    """Return whether Horovod can reduce this very tensor in place."""
    is_dense = tensor.layout is torch.strided and tensor.is_contiguous()
    return tensor.dtype in REDUCED and is_dense and not tensor.requires_grad and arrived(tensor) is tensor


def arrived(tensor: Tensor) -> Tensor:
    """Return a tensor that has its numbers: torch's tensor parts return one that waits for them when it is used.

    Such a tensor (AsyncCollectiveTensor) has no memory of its own, and a view of it does not wait either.
    """
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


def to_reduce(tensor: Tensor) -> Tensor:
    """Return `tensor` as something that can be added up: of its own memory where that is possible."""
    _refuse_divided(tensor)
    tensor = as_real(arrived(tensor.detach()))
    if tensor.dtype not in REDUCED:
        if tensor.dtype not in _REDUCED_AS:
            raise TypeError(
                f"Tensors of {tensor.dtype} cannot be reduced over ranks. Received: shape {tuple(tensor.shape)}. "
                f"Cast it to one of {sorted(str(t) for t in (*REDUCED, *_REDUCED_AS))} first."
            )
        tensor = tensor.to(_REDUCED_AS[tensor.dtype])
    return tensor.contiguous()


def to_move(tensor: Tensor) -> Tensor:
    """Return `tensor` as something that can be sent bit for bit; `from_move` turns it back."""
    _refuse_divided(tensor)
    tensor = arrived(tensor.detach()).resolve_conj().resolve_neg().contiguous()
    if tensor.dtype in _MOVED:
        return tensor
    if tensor.dtype.itemsize not in _BITS:  # complex128
        return torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.dtype.itemsize])


def _refuse_divided(tensor: Tensor) -> None:
    """Raise TypeError for a tensor that torch has divided over ranks: it has no memory that Horovod could send."""
    if divided.is_divided(tensor):
        raise TypeError(
            "torch has divided this tensor over ranks, and each has a part of it (DTensor). Received: shape "
            f"{tuple(tensor.shape)}. Use the methods of the Grid, such as grid.broadcast_parameters(model), or send "
            "tensor.to_local() among ranks that hold the same part"
        )


def from_move(moved: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `to_move` made of a tensor of `dtype`, as that type again."""
    if dtype in _MOVED:
        return moved
    return torch.view_as_complex(moved) if dtype.itemsize not in _BITS else moved.view(dtype)


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Return a tensor's dimensions in the order of its memory, if it is dense in another order than its own.

    A tensor in channels_last is. None for others: contiguous ones, and those with gaps in memory.
    """
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else None


def in_order(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Return a view with dimensions in the order of memory, and one more.

    Horovod compares shapes over ranks. By the number of dimensions it refuses ranks whose weights have another order.
    """
    return tensor.permute(*order).unsqueeze(-1)


def from_order(view: Tensor, order: Sequence[int]) -> Tensor:
    """Return what `in_order` made of a tensor as that tensor again."""
    places = {dim: place for place, dim in enumerate(order)}
    return view.squeeze(-1).permute([places[dim] for dim in range(len(order))])


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one shape are one and the same."""
    return a.dtype == b.dtype and a.data_ptr() == b.data_ptr()
