"""How a gradient is made smaller for the wire."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
    """Send floats as bfloat16, but add them up as float32: half the bytes, float32's range.

    Each rank receives one shard of all ranks' bits, adds it up in float32, rounds once, and sends the result back,
    so that all ranks hold the same bits. Applies to Average and Sum.
    """

    dtype = torch.bfloat16


class Compression:
    """The compressions there are: `none` (the default), `fp16` and `bf16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
