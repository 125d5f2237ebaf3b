"""Compressors: how gradients travel, and what is remembered of each for the next step."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from hvdtrain.torch.ops import engine, pack
from hvdtrain.torch.ops.engine import Average, Handle, Staged
from hvdtrain.torch.ops.submit import Reduction, submit
from hvdtrain.torch.ops.wire import as_real, from_real


class Compressor:
    """The form in which gradients are sent. By default `compress` makes each smaller, and an allreduce adds them up.

    For a compression without a memory, give a subclass two static methods, `compress` and `decompress`, as for Horovod.
    For one with a memory, or with collectives of its own, write `exchange`, and `bind`, `state` and `load`.
    """

    name = ""  # in `Trainer(compression=...)` and in logs; the class's name where it is empty
    # True if values travel by themselves, as `wire_type`: then small gradients may travel in one tensor.
    is_cast: ClassVar[bool] = False
    # True where a rank that has joined could not take part in `exchange`; then gradients travel as they are.
    needs_all_ranks: ClassVar[bool] = False
    has_memory: ClassVar[bool] = False  # True if `state` returns something, which each `exchange` changes
    # Gradients of a device that are given to one `exchange`, at most; 0: each is given alone, and Horovod fuses them.
    bucket_bytes: ClassVar[int] = 0

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the smaller tensor, and what `decompress` needs besides it."""
        raise NotImplementedError("This compressor is for the gradients of an optimizer only.")

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return `tensor` as it was before `compress`, except for rounding."""
        raise NotImplementedError

    def wire_type(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type as which values of a type travel, if `is_cast`."""
        return dtype

    def bind(self, names: Sequence[str]) -> Compressor:
        """Return a compressor for the gradients of these parameters, whose memory nobody else uses; itself without."""
        return self

    def exchange(self, tensors: Sequence[Tensor], how: Reduction, name: str, names: Sequence[str] = ()) -> Handle:
        """Start to reduce tensors, which may be overwritten; the handle gives the results in their types.

        All ranks call it with tensors of the same names and shapes. `Staged` is a handle of several collectives.

        Args:
            tensors: on one device.
            how: the operation and its factors.
            name: of the operations; the next `exchange` of this name begins after this one's end.
            names: of the tensors, among those to which the compressor is bound.
        """
        sent, contexts = zip(*map(self.compress, tensors), strict=True)
        handle = submit(sent, how, name, in_place=True, counted=False)
        return Handle([handle], lambda results: list(map(self.decompress, results, contexts)), name)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the memory of this rank, by names as in `rank_state`: "mean.error.NAME" for a parameter's error.

        No exchange is in flight then. The arrays are copies.
        """
        return {}

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore what `state` returned, as far as it is among these arrays of `rank_state`."""


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


class _CastCompressor(Compressor):
    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)

    def wire_type(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if dtype.is_floating_point else dtype


class FP16Compressor(_CastCompressor):
    """Send floats as float16 and add them up as float16, as Horovod does: may overflow beyond 65504."""

    name = "fp16"
    dtype = torch.float16
    is_cast = True


class BF16Compressor(_CastCompressor):
    """Send floats as bfloat16, but add them up as float32, for Average and Sum: half the bytes, float32's range.

    Horovod 0.28.1 can move bfloat16, as float16's bits, but not add it up: each rank gets its shard from all
    (alltoall), adds it up in float32, rounds once, and sends the result to all (allgather).
    """

    name = "bf16"
    dtype = torch.bfloat16
    needs_all_ranks = True  # Horovod has no alltoall with ranks that joined
    bucket_bytes = 25 * 2**20  # Horovod does not fuse alltoall; backward still overlaps

    def exchange(self, tensors: Sequence[Tensor], how: Reduction, name: str, names: Sequence[str] = ()) -> Handle:
        """Start a sum or mean of floats on one device."""
        return Staged(_alltoall_and_allgather(tensors, how, name), name)


def _alltoall_and_allgather(tensors: Sequence[Tensor], how: Reduction, name: str) -> Generator[Any, Any, list[Tensor]]:
    dtypes, size, native = [t.dtype for t in tensors], how.process_set.size(), engine.native()
    tensors = [as_real(t.detach()) for t in tensors]
    shapes = [t.shape for t in tensors]
    shard = -(-sum(t.numel() for t in tensors) // size)
    bits = torch.zeros(size * shard, dtype=torch.bfloat16, device=tensors[0].device)
    for part, tensor in zip(pack.parts(bits, shapes), tensors, strict=True):
        part.copy_(tensor * how.prescale_factor if how.prescale_factor != 1.0 else tensor)
    del tensors
    sent = bits.view(torch.float16)
    scattered, _ = yield native.alltoall_async(sent, name=f"{name}.scatter", process_set=how.process_set)
    # (size, shard): one row per rank, added up in rank order
    mine = scattered.view(torch.bfloat16).view(size, -1).float().sum(0)
    factor = how.postscale_factor / (size if how.op == Average else 1)
    if factor != 1.0:
        mine *= factor
    sent = mine.to(torch.bfloat16).view(torch.float16)
    gathered = yield native.allgather_async(sent, name=f"{name}.gather", process_set=how.process_set)
    parts = zip(pack.parts(gathered.view(torch.bfloat16), shapes), dtypes, strict=True)
    return [from_real(part.float() if dtype.is_complex else part, dtype) for part, dtype in parts]


class Compression:
    """The compressors there are, by the names that `Trainer(compression=...)` takes; `none` is the default."""

    none = NoneCompressor  # classes, as Horovod's are: scripts subclass them
    fp16 = FP16Compressor
    bf16 = BF16Compressor


class _Foreign(Compressor):
    """A class or object of a user's, or of Horovod, that has `compress` and `decompress`, as a compressor."""

    def __init__(self, methods: Any) -> None:
        self.compress, self.decompress = methods.compress, methods.decompress  # type: ignore[method-assign]
        name = getattr(methods, "__name__", type(methods).__name__)
        self.name = {"NoneCompressor": "none", "FP16Compressor": "fp16"}.get(name, name)  # Horovod's own


def resolve(compression: Any) -> Compressor:
    """Return the compressor of a name, a compressor, a class of one, or anything with Horovod's two static methods."""
    if isinstance(compression, str):
        compression = getattr(Compression, compression, compression)
    cls = compression if isinstance(compression, type) else type(compression)
    # Else a subclass may have another `compress`, which an inherited `exchange` would not call.
    if issubclass(cls, Compressor) and (cls.__module__ == __name__ or cls.exchange.__module__ != __name__):
        made: Compressor = compression() if isinstance(compression, type) else compression
        return made
    if not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        raise ValueError(
            "compression must be hvd.Compression.none, .fp16 or .bf16, or have the methods compress and decompress. "
            f"Received: {compression!r}"
        )
    return _Foreign(compression)
