"""Send gradients as they are, or as float16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hvdtrain.torch.ops.compression.compressor import Compressor


class NoneCompressor(Compressor):
    """Send tensors as they are."""

    name = "none"
    is_cast = True

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return `tensor`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return `tensor`."""
        return tensor


class CastCompressor(Compressor):
    """Send floats as another type."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return floats as `dtype`."""
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return `tensor` in its type of before."""
        return tensor.to(ctx)

    def wire_type(self, dtype: torch.dtype) -> torch.dtype:
        """Return `dtype` for floats."""
        return self.dtype if dtype.is_floating_point else dtype


class FP16Compressor(CastCompressor):
    """Send floats as float16 and add them up as float16, as Horovod does: may overflow beyond 65504."""

    name = "fp16"
    dtype = torch.float16
    is_cast = True
