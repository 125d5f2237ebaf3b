"""What is reduced in one operation: a gradient, a group of gradients, or a bucket under bf16 compression."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hvdtrain.torch.ops import engine, pack
from hvdtrain.torch.ops.compression import BF16Compressor, Compression, NoneCompressor, is_native, same_memory
from hvdtrain.torch.ops.engine import Average, Handle, Sum
from hvdtrain.torch.ops.reduce_ops import BF16Exchange, Reduction, sparse_allreduce_async, submit

_BUCKET_BYTES = 25 * 2**20  # alltoall is not fused by Horovod, so bf16 fuses here; backward still overlaps


@dataclass(frozen=True)
class ReducerOptions:
    """How gradients are to be reduced; see `DistributedOptimizer`."""

    compression: Any = Compression.none
    op: int = Average
    gradient_predivide_factor: float = 1.0
    groups: Any = None
    sparse_as_dense: bool = False
    process_set: Any = None
    average_aggregated_gradients: bool = False


def partition(params: Sequence[Parameter], options: ReducerOptions) -> list[list[Parameter]]:
    """Return the groups of parameters that are reduced together, in the same order on all ranks."""
    return pack.partition(params, options.groups, _BUCKET_BYTES if options.compression is BF16Compressor else 0)


def reduction(options: ReducerOptions, scale: float) -> Reduction:
    """Return the operation and factors that reduce a gradient; `scale` multiplies it."""
    predivide = options.gradient_predivide_factor  # 1 unless the operation is Average
    return Reduction(options.op, 1.0 / predivide, scale * predivide, options.process_set)


class ReductionUnit:
    """Gradients that are reduced in one operation, of parameters on one device; the first name is the operation's."""

    ready: int  # how many of the gradients backward has made
    _direct: Any  # Horovod's handle, if the gradient itself is sent
    _handle: Any
    _sent: list[Tensor]  # empty if the gradient itself was sent, or a sparse one
    _contexts: list[Any]
    _flags: list[bool]

    def __init__(self, params: list[Parameter], names: list[str], options: ReducerOptions, scale: float) -> None:
        self.params, self.names, self._options = params, names, options
        self.set_scale(scale)
        self._compression: Any = NoneCompressor
        self._abandoned: Any = None
        self.reset()

    def set_scale(self, scale: float) -> None:
        """Multiply the gradients by `scale`, from the next reduction on."""
        self._scale = scale
        self.how = reduction(self._options, scale)

    @property
    def is_started(self) -> bool:
        """True from `start` to `reset`."""
        return self._direct is not None or self._handle is not None

    @property
    def takes_sparse(self) -> bool:
        """True if a sparse gradient is sent as such; in a group it is made dense."""
        return len(self.params) == 1 and not self._options.sparse_as_dense

    def flags(self) -> list[bool]:
        """Return two flags per parameter: has a dense gradient, has a sparse one. They are constant until `reset`."""
        if not self._flags:
            for param in self.params:
                grad = param.grad
                sparse = grad is not None and grad.is_sparse
                self._flags += [grad is not None and not sparse, sparse]
        return self._flags

    def start(self, all_active: Callable[[], bool], *, sparse: bool = False) -> None:
        """Send the gradients; a missing one as zeros, or as `sparse` if it is on other ranks."""
        self._drain()
        self.flags()
        options = self._options
        grad = self.params[0].grad
        is_plain = len(self.params) == 1 and options.compression is NoneCompressor
        if is_plain and grad is not None and is_native(grad):
            self._direct = self.how.send(grad, self.names[0])  # the gradient itself; fast, because backward waits
            return
        if self.takes_sparse and (sparse or (grad is not None and grad.is_sparse)):
            grad = _no_entries(self.params[0]) if grad is None else grad
            self._handle = sparse_allreduce_async(grad, self.names[0], options.op, options.process_set)
            return
        tensors = [dense_gradient(p) for p in self.params]
        if options.compression is BF16Compressor and options.op in (Average, Sum) and all_active():
            self._contexts, self._sent = [], tensors
            self._handle = BF16Exchange(tensors, self.how, self.names[0])
            return
        # bf16 without all ranks: not compressed, since joined ranks can only take part in an allreduce
        self._compression = NoneCompressor if options.compression is BF16Compressor else options.compression
        self._sent, self._contexts = map(list, zip(*map(self._compression.compress, tensors), strict=True))
        self._handle = submit(self._sent, self.how, self.names[0], in_place=True, counted=False)

    def finish(self, present: Sequence[bool] | None, correction: float) -> None:
        """Wait, and store the results times `correction` where any rank has a gradient (`present`; None: as here)."""
        if self._direct is not None:
            engine.native().synchronize(self._direct)
            grad = self.params[0].grad
            if correction != 1.0 and grad is not None:
                grad.detach().mul_(correction)
            return
        results = self._handle.wait()
        if not self._sent:  # a sparse gradient
            self.params[0].grad = (results * (self._scale * correction)).coalesce()
            return
        if self._contexts:
            results = list(map(self._compression.decompress, results, self._contexts))
        there = [p.grad is not None for p in self.params] if present is None else present
        for param, result, wanted in zip(self.params, results, there, strict=True):
            if wanted:
                store_gradient(param, result.mul_(correction) if correction != 1.0 else result)

    def begin_second_half(self) -> None:
        """Start the second half of a bf16 exchange, so that several are in flight at once."""
        if isinstance(self._handle, BF16Exchange):
            self._handle.first_half.wait()

    def abandon(self) -> None:
        """Stop using the operation in flight; the next `start` waits for it, because it needs the same name."""
        if self.is_started:
            self._abandoned = self._handle or Handle([self._direct], lambda _: None)

    def _drain(self) -> None:
        """Wait for an abandoned step's operation, which would overwrite the next step's numbers."""
        drain(self._abandoned)
        self._abandoned = None

    def reset(self) -> None:
        """Forget this step."""
        self.ready, self._direct, self._handle = 0, None, None
        self._sent, self._contexts, self._flags = [], [], []


def drain(handle: Any) -> None:
    """Wait for an operation whose result is not needed, so that its name is free again."""
    if handle is not None and not handle.is_stale:
        with contextlib.suppress(Exception):  # it failed or was interrupted, which was reported already
            handle.wait()


def _no_entries(param: Parameter) -> Tensor:
    """Return a sparse gradient without entries; its indices are those of an embedding, of one dimension."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)  # torch warns without it


def dense_gradient(param: Parameter) -> Tensor:
    """Return the gradient itself if it is dense, else a dense copy; zeros if there is none."""
    if param.grad is None:
        return torch.zeros_like(param, memory_format=torch.contiguous_format)
    grad = param.grad.detach()
    return grad.to_dense() if grad.is_sparse else grad


def store_gradient(param: Parameter, result: Tensor) -> None:
    """Put a reduced gradient where the local one is, in its layout."""
    grad = param.grad
    if grad is None:
        param.grad = result.to(param.dtype)
    elif grad.is_sparse:
        param.grad = result.to(grad.dtype).to_sparse(grad.sparse_dim())
    elif not same_memory(grad, result):
        grad.detach().copy_(result)
