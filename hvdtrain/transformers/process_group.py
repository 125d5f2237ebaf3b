"""torch.distributed over Horovod: what transformers and accelerate gather, broadcast and wait with.

Only Horovod's collectives are used: no store is shared between ranks, and no socket is opened. Gradients do not come
this way; `hvd.DistributedOptimizer` sends them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch._C._distributed_c10d import Work as _Work

import hvdtrain.torch as hvd
from hvdtrain.distributed.world import World
from hvdtrain.errors import HvdTrainError

BACKEND = "horovod"
_OPS = {
    dist.ReduceOp.SUM: hvd.Sum,
    dist.ReduceOp.AVG: hvd.Average,
    dist.ReduceOp.MAX: hvd.Max,
    dist.ReduceOp.MIN: hvd.Min,
    dist.ReduceOp.PRODUCT: hvd.Product,
}
_MISSING = (
    "all_gather_single_coalesced", "all_to_all_single", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "allreduce_coalesced", "alltoall", "alltoall_base", "gather", "monitored_barrier", "recv", "recv_anysource",
    "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter", "send", "_reduce_scatter_base",
)  # fmt: skip


class HorovodProcessGroup(dist.ProcessGroup):
    """All ranks, with the collectives that transformers and accelerate use; each returns when it is done.

    Signatures are those by which torch.distributed calls a group; torch's class has further ones.
    """

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the backend's name."""
        return BACKEND

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """Reduce each tensor over ranks, in place."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        kind = next((ours for theirs, ours in _OPS.items() if op == theirs), None)
        if kind is None:
            raise HvdTrainError(f"torch.distributed over Horovod has no {op}. Use SUM, AVG, MIN, MAX or PRODUCT.")
        for tensor in tensors:
            tensor.detach().copy_(hvd.allreduce(tensor.detach(), op=kind))
        return _Done(tensors)

    def broadcast(self, tensors: Any, opts: Any) -> Any:  # type: ignore[override]
        """Overwrite each tensor with the root's."""
        for tensor in tensors:
            hvd.broadcast_(tensor.detach(), opts.rootRank)
        return _Done(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Fill each list of outputs with all ranks' tensors; shapes must be equal on all ranks."""
        for received, sent in zip(outputs, inputs, strict=True):
            rows = _gather(sent)
            for rank, place in enumerate(received):
                place.detach().copy_(rows[rank].view_as(place))
        return _Done([tensor for received in outputs for tensor in received])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002 - torch's name
        """Fill `output` with all ranks' tensors, one after the other; shapes must be equal on all ranks."""
        output.detach().copy_(_gather(input).view_as(output))
        return _Done([output])

    _allgather_base = all_gather_single  # its name before torch 2.13

    def barrier(self, opts: Any = None) -> Any:
        """Return when all ranks have called it."""
        hvd.barrier()
        return _Done([])


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(self: HorovodProcessGroup, *args: Any, **kwargs: Any) -> Any:
        raise HvdTrainError(
            f"torch.distributed over Horovod has no {name}. It has all_reduce, all_gather, broadcast and barrier; "
            f"hvdtrain.torch has more. Received: a call on rank {self.rank()}"
        )

    return refuse


for _name in _MISSING:
    setattr(HorovodProcessGroup, _name, _refusal(_name))


class _Done(_Work):
    """An operation that has ended."""

    def __init__(self, result: list[Tensor]) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


def _gather(tensor: Tensor) -> Tensor:
    """Return all ranks' tensors as rows, shape (ranks, elements)."""
    flat = tensor.detach().contiguous().view(-1)
    lengths = hvd.allgather_async(torch.tensor([flat.numel()], dtype=torch.int64, device="cpu"))
    gathered: Tensor = hvd.allgather_async(flat).wait()
    if set(lengths.wait().tolist()) != {flat.numel()}:
        raise HvdTrainError(
            "torch.distributed gathers tensors of equal shapes. Received: "
            f"{tuple(tensor.shape)} on rank {dist.get_rank()}, and other shapes elsewhere. Pad them first "
            "(accelerator.pad_across_processes), or use hvdtrain.torch.allgather."
        )
    return gathered.view(dist.get_world_size(), -1)


def begin(world: World) -> None:
    """Let torch.distributed use Horovod; raises HvdTrainError where it runs over something else."""
    if dist.is_initialized():
        if dist.get_backend() != BACKEND:
            raise HvdTrainError(
                f"torch.distributed runs over {dist.get_backend()} already, on rank {world.rank}. Remove "
                "init_process_group from the script: hvdtrain.transformers starts it over Horovod."
            )
        return
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
    hook = sys.excepthook
    # The store is this process's own: Horovod has brought the ranks together already.
    dist.init_process_group(BACKEND, store=HashStore(), rank=world.rank, world_size=world.size)
    sys.excepthook = hook  # torch's collects what the hook before it prints, and ours ends the process


def _create(store: Any, rank: int, size: int, timeout: Any) -> HorovodProcessGroup:
    if size != hvd.size():
        raise HvdTrainError(f"torch.distributed over Horovod has one group, of {hvd.size()} ranks. Received: {size}")
    return HorovodProcessGroup(rank, size)  # type: ignore[call-arg]
