"""What travels in place of a float32 gradient: itself, float16, or bfloat16.

Each backend does the casts in its own graph; the classes here say which, and stand in for Horovod's of the same name.
"""

from __future__ import annotations

from typing import Any

import keras


class Compressor:
    """How gradients travel; `wire` is the dtype's name on the way, None for their own."""

    wire: str | None = None

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, str | None]:
        """Return `tensor` as it travels, and its dtype to come back to."""
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        wire = cls.wire or ("float32" if dtype == "bfloat16" else None)  # Horovod knows no bfloat16
        if wire is None or not dtype.startswith(("float", "bfloat")):
            return tensor, None
        return keras.ops.cast(tensor, wire), dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: str | None) -> Any:
        """Return `tensor` in the dtype that `compress` noted."""
        return tensor if ctx is None else keras.ops.cast(tensor, ctx)


class NoneCompressor(Compressor):
    """Gradients travel as they are; bfloat16, which Horovod does not know, as float32."""


class FP16Compressor(Compressor):
    """Gradients travel and are summed as float16: half the bytes, a range of 6e-8 to 65504."""

    wire = "float16"


class BF16Compressor(Compressor):
    """Gradients travel as bfloat16 and are summed in float32: half the bytes, float32's range, 8 bits of precision."""

    wire = "bfloat16"


class Compression:
    """The choices for `DistributedOptimizer(compression=...)`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def resolve(compression: Any) -> type[Compressor]:
    """Return the compressor meant by `compression`: ours, or Horovod's or hvdtrain.torch's of the same name.

    Raises:
        ValueError: it is none of them.
    """
    if isinstance(compression, type) and issubclass(compression, Compressor):
        return compression
    for ours in (NoneCompressor, FP16Compressor, BF16Compressor):
        if getattr(compression, "__name__", "") == ours.__name__:
            return ours
    raise ValueError(f"compression must be Compression.none, .fp16 or .bf16. Received: {compression!r}")
