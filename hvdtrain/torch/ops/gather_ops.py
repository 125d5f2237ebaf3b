"""Collectives that move tensors: allgather, broadcast, alltoall, reducescatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.torch.ops import engine, whole_numbers
from hvdtrain.torch.ops.compression import Compression, without_memory
from hvdtrain.torch.ops.engine import Average, Handle, Sum
from hvdtrain.torch.ops.reduce_ops import differentiable
from hvdtrain.torch.ops.submit import Reduction, submit
from hvdtrain.torch.ops.wire import from_move, from_real, to_move, to_reduce


def _start(
    kind: str, sent: list[Tensor], back: Callable[..., Tensor], like: Sequence[Tensor], name: str, **options: Any
) -> Handle:
    """Start an operation of Horovod on one tensor, or its grouped form on several; the handle gives a list."""
    dtypes, is_group = [t.dtype for t in like], len(sent) > 1
    start = getattr(engine.native(), f"grouped_{kind}" if is_group else kind)
    # Horovod's thread gives the results their sizes, which torch forbids for tensors that were made in inference mode.
    with torch.inference_mode(False):
        part = start(sent if is_group else sent[0], name=name, **options)
    return Handle([part], lambda received: list(map(back, received if is_group else [received], dtypes)), name)


def _mean_of(grads: Sequence[Tensor], process_set: Any) -> Any:
    name = engine.auto_name("allreduce", process_set)
    return submit(grads, Reduction(process_set=process_set), name=name).wait()


def grouped_allgather_async(tensors: Sequence[Tensor], name: str | None = None, process_set: Any = None) -> Handle:
    """Start a grouped allgather; the handle gives a list of tensors. See `allgather`."""
    if any(t.dim() == 0 for t in tensors):
        raise ValueError("allgather concatenates on dimension 0. Received: a scalar tensor; reshape it to (1,)")
    process_set = engine.global_set(process_set)
    name = name or engine.auto_name("allgather", process_set)
    sent = [to_move(t) for t in tensors]
    return _start("allgather_async", sent, from_move, tensors, name, process_set=process_set)


def allgather_async(tensor: Tensor, name: str | None = None, process_set: Any = None) -> Handle:
    """Start an allgather and return a handle; see `allgather`."""
    return grouped_allgather_async([tensor], name, process_set).first()


def allgather(tensor: Tensor, name: str | None = None, process_set: Any = None) -> Tensor:
    """Return every rank's `tensor`, concatenated on dimension 0 in rank order; differentiable.

    Types and shapes are equal on all ranks, but for dimension 0. See `allreduce` for `name` and `process_set`.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(tensors: Sequence[Tensor], name: str | None = None, process_set: Any = None) -> list[Tensor]:
    """Return `allgather` of each tensor, sent together."""
    process_set = engine.global_set(process_set)
    handle = grouped_allgather_async(tensors, name, process_set)
    rows = [t.shape[0] for t in tensors]

    def gradients(grads: Sequence[Tensor]) -> list[Tensor]:
        # As in Horovod, this rank's rows of the mean gradient.
        means = _mean_of(grads, process_set)
        mine = torch.tensor([rows], dtype=torch.int64, device="cpu")
        rows_of_all = allgather_async(mine, process_set=process_set).wait()  # (size, tensors)
        before = rows_of_all[: process_set.rank()].sum(0).tolist()
        return [mean.narrow(0, start, n) for mean, start, n in zip(means, before, rows, strict=True)]

    return differentiable(handle, gradients, tensors)


def broadcast_async_(tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Start a broadcast into `tensor`; any type and memory layout. See `broadcast`."""
    process_set = engine.global_set(process_set)
    name = name or engine.auto_name("broadcast", process_set)
    sent = to_move(tensor)
    part = engine.native().broadcast_async_(sent, root_rank, name=name, process_set=process_set)

    def finish(received: Tensor) -> Tensor:
        if received.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(from_move(received, tensor.dtype))
        return tensor

    return Handle([part], finish, name)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Any:
    """Overwrite `tensor` with the root's and return it; see `broadcast`."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Start a broadcast into a new tensor; see `broadcast`."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Tensor:
    """Return the root's `tensor` on every rank; differentiable.

    Types and shapes are equal on all ranks. `root_rank` is a rank among all, also with a process set. See `allreduce`
    for `name` and `process_set`.
    """
    process_set = engine.global_set(process_set)

    def gradients(grads: Sequence[Tensor]) -> list[Tensor]:
        # As in Horovod, the root's is the mean over ranks, the others' is zero.
        (mean,) = _mean_of(grads, process_set)
        return [mean if engine.native().rank() == root_rank else torch.zeros_like(mean)]

    return differentiable(broadcast_async(tensor, root_rank, name, process_set), gradients, [tensor])[0]


def alltoall_async(tensor: Tensor, splits: Any = None, name: str | None = None, process_set: Any = None) -> Handle:
    """Start an alltoall; the handle gives (rows received, their number from each rank). See `alltoall`."""
    process_set = engine.global_set(process_set)
    name = name or engine.auto_name("alltoall", process_set)
    if splits is not None:  # Horovod takes 32-bit integers only
        splits = torch.as_tensor(splits, device="cpu")
        if splits.is_floating_point():
            raise ValueError(f"splits must be whole numbers of rows. Received: {splits.dtype}")
        splits = splits.to(torch.int32)
    with torch.inference_mode(False):  # as in _start
        part = engine.native().alltoall_async(to_move(tensor), splits, name=name, process_set=process_set)
    dtype = tensor.dtype
    return Handle([part], lambda outputs: (from_move(outputs[0], dtype), outputs[1]), name)


def alltoall(tensor: Tensor, splits: Any = None, name: str | None = None, process_set: Any = None) -> Any:
    """Send each rank some rows of `tensor` and return the rows received, in rank order; differentiable.

    `splits` has the number of rows for each rank; None splits evenly. With it, an int tensor is returned too: how many
    rows came from each rank. Types and shapes are equal on all ranks, but for dimension 0. See `allreduce` for `name`
    and `process_set`.
    """
    handle = alltoall_async(tensor, splits, name, process_set)

    def gradients(grads: Sequence[Tensor]) -> list[Tensor]:
        return [alltoall_async(grads[0], rows, process_set=process_set).wait()[0]]

    received, rows = differentiable(handle, gradients, [tensor])
    return received if splits is None else (received, rows)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a grouped reducescatter; the handle gives a list of tensors. See `reducescatter`."""
    process_set = engine.global_set(process_set)
    name = name or engine.auto_name("reducescatter", process_set)
    sent = [to_reduce(t) for t in tensors]
    if prescale_factor != 1.0:  # Horovod would do it in its fusion buffer, and refuse what is larger
        sent = [t * prescale_factor if t.is_floating_point() else whole_numbers.times(t, prescale_factor) for t in sent]
    options = {"op": op, "process_set": process_set, "postscale_factor": postscale_factor}
    return _start("reducescatter_async", sent, from_real, tensors, name, **options)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a reducescatter and return a handle; see `reducescatter`."""
    return grouped_reducescatter_async([tensor], name, op, process_set, prescale_factor, postscale_factor).first()


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce `tensor` over ranks and return this rank's share of its rows; differentiable.

    See `allreduce` for the arguments. `op` is Average or Sum. bf16 adds up in float32 and saves no bytes here.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return `reducescatter` of each tensor, sent together."""
    compressor = without_memory(compression)
    compressed, contexts = zip(*map(compressor.compress, tensors), strict=True)
    process_set = engine.global_set(process_set)
    handle = grouped_reducescatter_async(compressed, name, op, process_set, prescale_factor, postscale_factor)
    factor = prescale_factor * postscale_factor * (process_set.size() if op == Sum else 1)

    def gradients(grads: Sequence[Tensor]) -> Any:
        scaled = [g * factor if factor != 1.0 else g for g in grads]
        return grouped_allgather_async(scaled, process_set=process_set).wait()

    return list(map(compressor.decompress, differentiable(handle, gradients, compressed), contexts))
