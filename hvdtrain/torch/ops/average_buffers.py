"""Make buffers, such as running statistics, equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvdtrain.distributed import checksums
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import World
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.ops import dtypes
from hvdtrain.torch.ops.wire import as_real

_SIGN = torch.iinfo(torch.int64).min


def average_buffers(buffers: Sequence[tuple[str, Tensor]], world: World) -> None:
    """Average floats and complex numbers over ranks; integers become the largest, flags true if one is. A collective.

    A buffer that is equal on all ranks, such as a mask or a table, stays as it is, bit for bit.

    Raises:
        HvdTrainError: on every rank, if ranks have different values of a type in which torch cannot compute.
    """
    ranks = DataRanks(world)
    differing = _differing([(name, buffer) for name, buffer in buffers if buffer.numel()], ranks)
    for name, buffer in differing:
        if not dtypes.can_combine(buffer):
            raise HvdTrainError(
                f"Ranks hold different values of the buffer {name}, and values of its type have no mean. Received: "
                f"{buffer.dtype} on rank {world.rank}. Let each rank change it in the same way."
            )
    means = [as_real(buffer) for _, buffer in differing if dtypes.rule(buffer) == "mean"]
    if means:
        flat = torch.cat([each.to(torch.float64).reshape(-1).cpu() for each in means])
        _store(torch.from_numpy(ranks.allreduce(flat.numpy(), "mean", name="average_buffers")), means)
    integers = [buffer for _, buffer in differing if dtypes.rule(buffer) == "max"]
    if integers:
        flat = torch.cat([_in_order(each).reshape(-1).cpu() for each in integers])
        _store(torch.from_numpy(ranks.allreduce(flat.numpy(), "max", name="average_buffers")), integers)


def _differing(buffers: Sequence[tuple[str, Tensor]], ranks: DataRanks) -> list[tuple[str, Tensor]]:
    """Return the buffers that are not equal on all ranks."""
    if not buffers:
        return []
    arrays = (dtypes.to_array(buffer) for _, buffer in buffers)
    same = checksums.equal_on_ranks(arrays, ranks=ranks, name="average_buffers.hashes")
    return [each for each, is_same in zip(buffers, same, strict=True) if not is_same]


def _in_order(buffer: Tensor) -> Tensor:
    """Return integers as int64, in which a uint64's order is the same after a shift by half its range."""
    return buffer.view(torch.int64) ^ _SIGN if buffer.dtype == torch.uint64 else buffer.to(torch.int64)


@torch.no_grad()
def _store(flat: Tensor, buffers: Sequence[Tensor]) -> None:
    for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        found = (part ^ _SIGN).view(torch.uint64) if buffer.dtype == torch.uint64 else part
        buffer.copy_(found.view(buffer.shape))
