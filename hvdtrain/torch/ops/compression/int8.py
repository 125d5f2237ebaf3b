"""Send gradients as 8-bit integers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.distributed.compression import BLOCK, LARGEST, Int8
from hvdtrain.torch.ops import engine, pack
from hvdtrain.torch.ops.compression.memory import ErrorFeedback
from hvdtrain.torch.ops.submit import gather_equal_async


class Int8Compressor(ErrorFeedback):
    """Send blocks of 256 numbers as integers from -127 to 127, times a scale: the block's largest number / 127.

    Horovod adds 8-bit integers up in 8 bits. So each rank gets its shard from all (alltoall), adds it up as floats,
    rounds the mean again, and sends it to all (allgather). Each rank remembers what it rounded off, to the nearest
    integer; of the mean, the rank that has rounded it. Gradients are divided into slices, so that one slice
    is rounded while others are sent.

    For a gradient of n numbers a rank has b = ceil(n / 256) blocks of 260 bytes, in float32. To N ranks it sends b
    blocks by the alltoall and, of all gradients that travel together, 1 / N by the allgather, rounded up to blocks.
    """

    def __init__(self, scheme: Int8 | None = None, names: Sequence[str] = ()) -> None:
        super().__init__(scheme or Int8(), names)

    def mean(
        self, tensors: list[Tensor], names: Sequence[str], scale: float, process_set: Any, name: str
    ) -> Generator[Any, Any, list[Tensor]]:
        """Yield alltoalls and allgathers; return the mean as all ranks have rounded it."""
        size, rank, native = process_set.size(), process_set.rank(), engine.native()
        counts = [-(-tensor.numel() // BLOCK) for tensor in tensors]  # blocks of each tensor
        shards = Int8.shards(sum(counts), size)  # blocks of each rank, in each slice
        whole = tensors[0].new_zeros(size * sum(shards), BLOCK)
        rows = whole[: sum(counts)].split(counts)
        for row, tensor in zip(rows, tensors, strict=True):
            row.view(-1)[: tensor.numel()] = tensor.view(-1)
        slices = whole.split([size * shard for shard in shards])
        sent, scattered, gathered = [], [], []
        for number, part in enumerate(slices):
            sent.append(_rounded(part))
            how = {"name": f"{name}.scatter.{number}", "process_set": process_set}
            scattered.append(native.alltoall_async(sent[-1].view(-1), **how))
        for number, (part, shard) in enumerate(zip(slices, shards, strict=True)):
            received, _ = yield scattered[number]
            # (size, shard, BLOCK): one row per rank, added up in rank order
            mine = _numbers(received.view(size * shard, -1), whole.dtype).view(size, shard, BLOCK).mean(0)
            shared = _rounded(mine)
            gathered.append(gather_equal_async(shared.view(-1), f"{name}.gather.{number}", process_set))
            part -= _numbers(sent[number], whole.dtype)
            # The mean divides it by the number of ranks.
            part[rank * shard : (rank + 1) * shard] += (mine - _numbers(shared, whole.dtype)) * size
        del sent
        shared_by_all = []
        for handle, part in zip(gathered, slices, strict=True):
            everyones = yield handle
            shared_by_all.append(_numbers(everyones.view(len(part), -1), whole.dtype))
        means = torch.cat(shared_by_all)[: sum(counts)].split(counts)
        results = []
        for each, tensor, row, mean in zip(names, tensors, rows, means, strict=True):
            error, result = (pack.parts(blocks.reshape(-1), [tensor.shape])[0] for blocks in (row, mean))
            self.put_error(each, error, result.isfinite().all(), scale)
            results.append(result)
        return results


def _rounded(blocks: Tensor) -> Tensor:
    """Return (blocks, numbers) as (blocks, bytes): integers, and the scale. A block that is not finite has NaN."""
    scales = blocks.abs().amax(1, keepdim=True).div_(LARGEST)
    scales.clamp_(min=torch.finfo(blocks.dtype).tiny)  # of a block of zeros; NaN stays
    scales.masked_fill_(~scales.isfinite(), torch.nan)
    integers = (blocks / scales).round_().nan_to_num_(0.0).clamp_(-LARGEST, LARGEST).to(torch.int8)
    return torch.cat([integers.view(torch.uint8), scales.view(torch.uint8)], dim=1)


def _numbers(sent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `_rounded` made of blocks of this type, as numbers."""
    scales = sent[:, BLOCK:].contiguous().view(dtype)
    return sent[:, :BLOCK].contiguous().view(torch.int8).to(dtype).mul_(scales)
