"""Send gradients as bfloat16, and add them up as float32."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.distributed.compression import shards
from hvdtrain.torch.ops import engine, pack
from hvdtrain.torch.ops.compression.casts import CastCompressor
from hvdtrain.torch.ops.engine import Average, Handle, Staged
from hvdtrain.torch.ops.submit import Reduction, gather_equal_async
from hvdtrain.torch.ops.wire import as_real, from_real


class BF16Compressor(CastCompressor):
    """Send floats as bfloat16, but add them up as float32, for Average and Sum: half the bytes, float32's range.

    Horovod 0.28.1 can move bfloat16, as float16's bits, but not add it up: each rank gets its shard from all
    (alltoall), adds it up in float32, rounds once, and sends the result to all (allgather), in slices.
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
    slices = shards(sum(t.numel() for t in tensors), size, each_bytes=torch.bfloat16.itemsize)
    bits = torch.zeros(size * sum(slices), dtype=torch.bfloat16, device=tensors[0].device)
    for part, tensor in zip(pack.parts(bits, shapes), tensors, strict=True):
        part.copy_(tensor * how.prescale_factor if how.prescale_factor != 1.0 else tensor)
    del tensors
    scattered, gathered = [], []
    for number, sent in enumerate(bits.view(torch.float16).split([size * shard for shard in slices])):
        options = {"name": f"{name}.scatter.{number}", "process_set": how.process_set}
        scattered.append(native.alltoall_async(sent, **options))
    factor = how.postscale_factor / (size if how.op == Average else 1)
    for number, handle in enumerate(scattered):
        received, _ = yield handle
        # (size, shard): one row per rank, added up in rank order
        mine = received.view(torch.bfloat16).view(size, -1).float().sum(0)
        if factor != 1.0:
            mine *= factor
        rounded = mine.to(torch.bfloat16).view(torch.float16)
        gathered.append(gather_equal_async(rounded, f"{name}.gather.{number}", how.process_set))
    everyones = []
    for handle in gathered:
        everyones.append((yield handle))
    whole = torch.cat(everyones).view(torch.bfloat16)
    parts = zip(pack.parts(whole, shapes), dtypes, strict=True)
    return [from_real(part.float() if dtype.is_complex else part, dtype) for part, dtype in parts]
