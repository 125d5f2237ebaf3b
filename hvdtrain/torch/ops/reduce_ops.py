"""Allreduce and its family: adding up over ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.compression import Compression, without_memory
from hvdtrain.torch.ops.engine import Average, Handle, Sum
from hvdtrain.torch.ops.submit import Reduction, active_ranks_async, submit
from hvdtrain.torch.ops.wire import from_move, to_move

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Handle, gradients: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.gradients = gradients
        result = handle.wait()
        return (result,) if isinstance(result, Tensor) else tuple(result)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, None, *ctx.gradients(grads))


def differentiable(handle: Handle, gradients: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of an operation on `tensors`, whose gradients `gradients` makes of the results'."""
    return list(_Differentiable.apply(handle, gradients, *tensors))


def _reduced(start: Callable[..., Handle], how: Reduction, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return `tensors` reduced; the gradient of a sum or a mean is the same reduction of the gradients."""

    def gradients(grads: Sequence[Tensor]) -> list[Tensor]:
        if how.op not in (Average, Sum):  # Horovod's would be another number than the gradient
            raise NotImplementedError(
                f"allreduce has gradients for op=Average and op=Sum. Received: {name} with op={engine.OPS[how.op]}. "
                "Detach the tensor, or gather it with hvd.allgather, which has gradients, and reduce with torch."
            )
        return _reduced(start, how, engine.auto_name("allreduce", how.process_set), grads)

    return differentiable(start(tensors, how, name), gradients, tensors)


def _options(
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> tuple[Reduction, str]:
    """Return what the arguments of `allreduce_async` say, which are these."""
    if average is not None:
        if op is not None:
            raise ValueError(f"op supersedes average; give one of them. Received: op={op}, average={average}")
        words = "average= is Horovod's old word. Use op=hvd.Average or op=hvd.Sum."
        warnings.warn(words, DeprecationWarning, stacklevel=3)
        op = Average if average else Sum
    process_set = engine.global_set(process_set)
    how = Reduction(Average if op is None else op, prescale_factor, postscale_factor, process_set)
    return how, name or engine.auto_name("allreduce", process_set)


def _with_arguments_of(like: Callable[_P, Any]) -> Callable[[Callable[..., _R]], Callable[_P, _R]]:
    """Let a function that passes its arguments on show those of another, to type checkers and `help`."""

    def show(function: Callable[..., _R]) -> Callable[_P, _R]:
        returned = inspect.signature(function).return_annotation
        function.__signature__ = inspect.signature(like).replace(return_annotation=returned)  # type: ignore[attr-defined]
        return function

    return show


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Tensor:
    """Return `tensor` reduced over ranks; differentiable.

    Unlike Horovod's, the mean is over the ranks that have not joined, and bfloat16 tensors are taken.

    Args:
        tensor: shape and type equal on all ranks; not modified.
        average: Horovod's old word for op.
        name: equal on all ranks; unnamed calls are matched by their order.
        compression: `Compression.none`, `.fp16`, `.bf16`, or your own `Compressor`.
        op: Average (default), Sum, Min, Max, Product or Adasum.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
        process_set: the ranks that take part; None means all.

    Raises:
        HorovodInternalError: the collective failed, for example since shapes differ over ranks.
        TypeError: no reduction is defined for the tensor's type.
    """
    options = (average, name, compression, op, prescale_factor, postscale_factor, process_set)
    return grouped_allreduce([tensor], *options)[0]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[Tensor]:
    """Return `tensors`, each reduced over ranks, sent together; see `allreduce`."""
    how, name = _options(average, name, op, prescale_factor, postscale_factor, process_set)
    compressor = without_memory(compression)
    if compressor.needs_all_ranks and how.op in (Average, Sum) and how.process_set.size() > 1:
        active = active_ranks_async(name).wait() if engine.is_global(how.process_set) else how.process_set.size()
        if active == how.process_set.size():
            return _reduced(compressor.exchange, how, name, tensors)
    compressed, contexts = zip(*map(compressor.compress, tensors), strict=True)
    return list(map(compressor.decompress, _reduced(submit, how, name, compressed), contexts))


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Start an allreduce and return a handle on the result; see `allreduce`."""
    options = _options(average, name, op, prescale_factor, postscale_factor, process_set)
    return submit([tensor], *options).first()


@_with_arguments_of(allreduce_async)
def allreduce_async_(tensor: Tensor, *args: Any, **options: Any) -> Handle:
    """Start an `allreduce_async` in place; leave `tensor` alone until `synchronize`."""
    return submit([tensor], *_options(*args, **options), in_place=True).first()


@_with_arguments_of(allreduce_async)
def allreduce_(tensor: Tensor, *args: Any, **options: Any) -> Any:
    """Reduce `tensor` in place and return it; takes the arguments of `allreduce_async`."""
    return allreduce_async_(tensor, *args, **options).wait()


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Start a grouped allreduce and return a handle on the list of results; see `allreduce`."""
    return submit(tensors, *_options(average, name, op, prescale_factor, postscale_factor, process_set))


@_with_arguments_of(grouped_allreduce_async)
def grouped_allreduce_async_(tensors: Sequence[Tensor], *args: Any, **options: Any) -> Handle:
    """Start a `grouped_allreduce_async` in place."""
    return submit(tensors, *_options(*args, **options), in_place=True)


@_with_arguments_of(grouped_allreduce_async)
def grouped_allreduce_(tensors: Sequence[Tensor], *args: Any, **options: Any) -> Any:
    """Reduce `tensors` in place, sent together, and return them; takes the arguments of `grouped_allreduce_async`."""
    return grouped_allreduce_async_(tensors, *args, **options).wait()


def sparse_allreduce_async(tensor: Tensor, name: str, op: int, process_set: Any = None) -> Handle:
    """Start the reduction of a sparse COO tensor: all ranks' entries are gathered; entries at one place add up.

    The handle gives a new sparse tensor, not coalesced. `op` is Average or Sum. See `allreduce` for the arguments.
    """
    process_set = engine.global_set(process_set)
    # Ranks differ in their number of entries, which must be the first dimension: indices are (entries, sparse_dim).
    sent = {"values": to_move(tensor._values()), "indices": tensor._indices().t().contiguous()}
    gather = engine.native().allgather_async
    parts = [gather(part, name=f"{name}.{what}", process_set=process_set) for what, part in sent.items()]

    def finish(all_values: Tensor, all_indices: Tensor) -> Tensor:
        gathered = from_move(all_values, tensor.dtype)
        if op == Average:
            gathered = gathered / process_set.size()
        indices, device = all_indices.t(), gathered.device
        return torch.sparse_coo_tensor(indices, gathered, tensor.shape, device=device, check_invariants=False)

    return Handle(parts, finish, name)


def join(device: int = -1) -> int:
    """Report that this rank has no more data, and wait until every rank reports it.

    Meanwhile the others continue to reduce, and this rank adds zeros, on GPU number `device` to tensors on GPUs (-1 is
    this rank's); their means are over the active ranks. Returns the rank that joined last.
    """
    native = engine.native()
    if device == -1 and torch.cuda.is_initialized() and native.cuda_built():
        device = torch.cuda.current_device()  # other ranks wait in NCCL, where zeros on the CPU never arrive
    last = int(native.join(device))
    engine.count_from_zero()
    return last


def barrier(process_set: Any = None) -> None:
    """Return once every rank of the process set (None: all) has called it."""
    engine.native().barrier(process_set=engine.global_set(process_set))
