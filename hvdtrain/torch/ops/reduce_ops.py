"""Allreduce and its family: adding up over ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.compression import (
    BF16Compressor,
    Compression,
    as_real,
    from_move,
    from_real,
    to_move,
    to_reduce,
)
from hvdtrain.torch.ops.engine import Adasum, Average, Handle, Sum

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Reduction:
    """How to reduce: Horovod's arguments that all of allreduce's forms share, under Horovod's names."""

    op: int = Average
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    process_set: Any = None

    def send(self, tensor: Tensor, name: str) -> Any:
        """Start the reduction of one tensor in place; return Horovod's handle."""
        return engine.native().allreduce_async_(tensor, name=name, **vars(self))


def active_ranks_async(name: str) -> Handle:
    """Count the ranks that have not joined: each sends a one; for a rank that joined, Horovod sends a zero."""
    ones = torch.ones(1)
    part = engine.native().allreduce_async_(ones, name=f"{name}.active", op=Sum)
    return Handle([part], lambda total: round(float(total)), name)


def submit(
    tensors: Sequence[Tensor], how: Reduction, name: str, *, in_place: bool = False, counted: bool = True
) -> Handle:
    """Start one reduction of `tensors`, grouped if there are several; the handle gives a list of tensors.

    For a mean with `counted`, the sum is divided by the number of ranks that have not joined; else the caller does it.
    """
    if how.op == Adasum:
        check_adasum(tensors[0])
    if how.op not in (Average, Sum) and any(tensor.is_complex() for tensor in tensors):
        raise TypeError(
            "Complex numbers can be averaged and added up only. Received: another op. Use torch.view_as_real."
        )
    wires = []
    for tensor in tensors:
        sent = to_reduce(tensor)
        wires.append(sent if in_place or sent.data_ptr() != tensor.data_ptr() else sent.clone())
    # Horovod multiplies a sum by a rounded 1/size and cuts: 49 ones on 49 ranks would have the integer mean 0.
    whole_numbers = how.op == Average and not any(sent.is_floating_point() for sent in wires)
    sent_as = replace(how, op=Sum) if whole_numbers else how
    if len(wires) == 1:
        parts = [sent_as.send(wires[0], name)]
    else:
        parts = [engine.native().grouped_allreduce_async_(wires, name=name, **vars(sent_as))]
    expected = how.process_set.size()
    if counted and how.op == Average and engine.is_global(how.process_set) and expected > 1:
        parts.append(active_ranks_async(name))

    def finish(_: Any, active: int = expected) -> list[Tensor]:
        results = []
        for tensor, received in zip(tensors, wires, strict=True):
            if whole_numbers:
                received.copy_(torch.div(received, active, rounding_mode="trunc"))
            elif active != expected:
                received.mul_(expected / active)
            if not in_place:
                results.append(from_real(received, tensor.dtype))
                continue
            if received.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(from_real(received, tensor.dtype))
            results.append(tensor)
        return results

    return Handle(parts, finish, name)


class BF16Exchange(Handle):
    """A sum or mean of floats on one device, with float32's accuracy and half its bytes.

    Horovod 0.28.1 can move bfloat16, as float16's bits, but not add it up: each rank gets its shard from all
    (alltoall), adds it up in float32, rounds once, and sends the result to all (allgather).
    """

    def __init__(self, tensors: Sequence[Tensor], how: Reduction, name: str) -> None:
        self._dtypes = [t.dtype for t in tensors]
        tensors = [as_real(t.detach()) for t in tensors]
        self._shapes = [t.shape for t in tensors]
        self._how, self._size = how, how.process_set.size()
        shard = -(-sum(t.numel() for t in tensors) // self._size)
        bits = torch.zeros(self._size * shard, dtype=torch.bfloat16, device=tensors[0].device)
        offset = 0
        for tensor in tensors:
            flat = tensor.reshape(-1)
            bits[offset : offset + flat.numel()] = flat * how.prescale_factor if how.prescale_factor != 1.0 else flat
            offset += flat.numel()
        sent = bits.view(torch.float16)
        scatter = engine.native().alltoall_async(sent, name=f"{name}.scatter", process_set=how.process_set)
        self.first_half = Handle([scatter], self._start_second_half, name)  # waiting for it starts the second
        super().__init__([self.first_half], self._split, name)

    def _start_second_half(self, scattered: tuple[Tensor, Tensor]) -> Any:
        # (size, shard): one row per rank, added up in rank order
        mine = scattered[0].view(torch.bfloat16).view(self._size, -1).float().sum(0)
        factor = self._how.postscale_factor / (self._size if self._how.op == Average else 1)
        if factor != 1.0:
            mine *= factor
        bits = mine.to(torch.bfloat16).view(torch.float16)
        return engine.native().allgather_async(bits, name=f"{self.name}.gather", process_set=self._how.process_set)

    def _split(self, gather: Any) -> list[Tensor]:
        bits = engine.native().synchronize(gather).view(torch.bfloat16)
        sizes = [shape.numel() for shape in self._shapes]
        parts = zip(bits[: sum(sizes)].split(sizes), self._shapes, self._dtypes, strict=True)
        return [
            from_real(part.view(shape).float() if dtype.is_complex else part.view(shape), dtype)
            for part, shape, dtype in parts
        ]


def check_adasum(tensor: Tensor) -> None:
    """Raise ValueError where Horovod has no Adasum, which needs MPI on GPUs too; Horovod fails after it has sent."""
    native = engine.native()
    if native.size() > 1 and not native.mpi_enabled():
        raise ValueError(
            f"Adasum needs MPI. Received: a tensor on {tensor.device}, and Gloo as data plane on rank {native.rank()}. "
            "Launch with `horovodrun --mpi`, or use op=Average."
        )


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
    """Return `tensors` reduced; the gradient of a reduction is the same reduction of the gradients."""

    def gradients(grads: Sequence[Tensor]) -> list[Tensor]:
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
    if compression is BF16Compressor and how.op in (Average, Sum) and how.process_set.size() > 1:
        active = active_ranks_async(name).wait() if engine.is_global(how.process_set) else how.process_set.size()
        if active == how.process_set.size():  # Horovod has no alltoall with ranks that joined
            return _reduced(BF16Exchange, how, name, tensors)
    compressed, contexts = zip(*(compression.compress(t) for t in tensors), strict=True)
    return list(map(compression.decompress, _reduced(submit, how, name, compressed), contexts))


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
        return torch.sparse_coo_tensor(all_indices.t(), gathered, tensor.shape, check_invariants=False)

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
