"""How a tensor travels: contiguous, of a type that Horovod knows, and made smaller where that is asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# What horovod.torch 0.28.1 adds up; narrower floats travel as float32, which also adds them up better.
REDUCED = {torch.float16, torch.float32, torch.float64, torch.int32, torch.int64}
_SMALL_INTEGERS = (torch.uint8, torch.int8, torch.int16)
_REDUCED_AS = {torch.bfloat16: torch.float32, **dict.fromkeys(_SMALL_INTEGERS, torch.int32)}
_MOVED = {*REDUCED, *_SMALL_INTEGERS}
_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


class Compressor:
    """What a compression does; subclass it with two static methods for your own."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the smaller tensor, and what `decompress` needs besides it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return `tensor` as it was before `compress`, except for rounding."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Send tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return `tensor`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return `tensor`."""
        return tensor


class _CastCompressor(Compressor):
    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Send floats as float16 and add them up as float16, as Horovod does: may overflow beyond 65504."""

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Send floats as bfloat16, but add them up as float32, for Average and Sum: half the bytes, float32's range."""

    dtype = torch.bfloat16


class Compression:
    """The compressions there are: `none` (the default), `fp16` and `bf16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def as_real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, of the same memory if possible; other tensors as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def from_real(real: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `as_real` made of a tensor of `dtype`, as that type again."""
    return (torch.view_as_complex(real) if dtype.is_complex else real).to(dtype)


def is_native(tensor: Tensor) -> bool:
    """Return whether Horovod can reduce this very tensor in place."""
    is_dense = tensor.layout is torch.strided and tensor.is_contiguous()
    return tensor.dtype in REDUCED and is_dense and not tensor.requires_grad


def to_reduce(tensor: Tensor) -> Tensor:
    """Return `tensor` as something that can be added up: of its own memory where that is possible."""
    tensor = as_real(tensor.detach())
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
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype in _MOVED:
        return tensor
    if tensor.dtype.itemsize not in _BITS:  # complex128
        return torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.dtype.itemsize])


def from_move(moved: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `to_move` made of a tensor of `dtype`, as that type again."""
    if dtype in _MOVED:
        return moved
    return torch.view_as_complex(moved) if dtype.itemsize not in _BITS else moved.view(dtype)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one shape are one and the same."""
    return a.dtype == b.dtype and a.data_ptr() == b.data_ptr()
