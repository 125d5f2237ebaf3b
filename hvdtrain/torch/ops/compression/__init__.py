"""Compressors: how gradients travel, and what is remembered of each for the next step; one scheme a file."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from hvdtrain.distributed import compression as schemes
from hvdtrain.distributed.compression import PowerSGD, Scheme, TopK
from hvdtrain.torch.ops.compression.bf16 import BF16Compressor as BF16Compressor
from hvdtrain.torch.ops.compression.casts import FP16Compressor as FP16Compressor
from hvdtrain.torch.ops.compression.casts import NoneCompressor as NoneCompressor
from hvdtrain.torch.ops.compression.compressor import Compressor as Compressor
from hvdtrain.torch.ops.compression.int8 import Int8Compressor as Int8Compressor
from hvdtrain.torch.ops.compression.powersgd import PowerSGDCompressor as PowerSGDCompressor
from hvdtrain.torch.ops.compression.topk import TopKCompressor as TopKCompressor


class Compression:
    """The compressors there are, by the names that `Trainer(compression=...)` takes; `none` is the default.

    `int8`, `topk(fraction)` and `powersgd(rank, after_steps)` are for the gradients of an optimizer: they remember what
    they have left out, and add it to the next gradient.
    """

    none = NoneCompressor  # classes, as Horovod's are: scripts subclass them
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor

    @staticmethod
    def topk(fraction: float) -> Compressor:
        """Return what sends the largest numbers of each gradient; see `hvdtrain.TopK`."""
        return TopKCompressor(TopK(fraction))

    @staticmethod
    def powersgd(rank: int = 4, after_steps: int = PowerSGD.after_steps) -> Compressor:
        """Return what sends matrices as products of narrow ones; see `hvdtrain.PowerSGD`."""
        return PowerSGDCompressor(PowerSGD(rank, after_steps))


class _Foreign(Compressor):
    """A class or object of a user's, or of Horovod, that has `compress` and `decompress`, as a compressor."""

    def __init__(self, methods: Any) -> None:
        self.compress, self.decompress = methods.compress, methods.decompress  # type: ignore[method-assign]
        name = getattr(methods, "__name__", type(methods).__name__)
        self.name = {"NoneCompressor": "none", "FP16Compressor": "fp16"}.get(name, name)  # Horovod's own


def resolve(compression: Any) -> Compressor:
    """Return a bound or unbound compressor.

    Args:
        compression: a name or a scheme of `hvdtrain.distributed.compression`, a compressor, a class of one, or
            anything with Horovod's two static methods.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(compression, str | Scheme):
        compression = _made(schemes.parse(compression))
    cls = compression if isinstance(compression, type) else type(compression)
    # Else a subclass may have another `compress`, which an inherited `exchange` would not call.
    if issubclass(cls, Compressor) and (_is_ours(cls) or not _is_ours(cls.exchange)):
        made: Compressor = compression() if isinstance(compression, type) else compression
        return made
    if not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise ValueError(
            "compression must be hvd.Compression.none, .fp16, .bf16, .int8, .topk(0.01) or .powersgd(4), a name or an "
            "object of these as for the Trainer, or have the methods compress and decompress. "
            f"Received: {compression!r}"
        )
    return _Foreign(compression)


def without_memory(compression: Any) -> Compressor:
    """Return the compressor for tensors that have no next step; ValueError for one that remembers gradients."""
    found = resolve(compression)
    if found.has_memory:
        raise ValueError(
            "This compression remembers what it has left out of each gradient, so it is for DistributedOptimizer and "
            f"the Trainer only. Received: {found.name}. Use none, fp16 or bf16 here."
        )
    return found


def _made(scheme: Scheme | str) -> Any:
    if isinstance(scheme, str):
        return getattr(Compression, scheme)
    return getattr(Compression, scheme.name)(*astuple(scheme))


def _is_ours(thing: Any) -> bool:
    """Return whether a class or a function comes from this folder."""
    return bool(thing.__module__ == __name__ or thing.__module__.startswith(f"{__name__}."))
