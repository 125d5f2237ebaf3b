"""Reduce in one operation a gradient, a group of gradients, or those of one exchange of a compressor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.compression import Compressor, NoneCompressor
from hvdtrain.torch.ops.engine import Average, Handle, Staged, Sum
from hvdtrain.torch.ops.reduce_ops import sparse_allreduce_async
from hvdtrain.torch.ops.sparse import no_entries
from hvdtrain.torch.ops.submit import Reduction
from hvdtrain.torch.ops.wire import from_order, in_order, is_native, memory_order, same_memory


@dataclass(frozen=True)
class ReducerOptions:
    """The options by which gradients are reduced; see `DistributedOptimizer`."""

    compression: Compressor = field(default_factory=NoneCompressor)  # bound to the parameters
    op: int = Average
    gradient_predivide_factor: float = 1.0
    groups: Any = None
    sparse_as_dense: bool = False
    process_set: Any = None
    average_aggregated_gradients: bool = False


def reduction(options: ReducerOptions, scale: float) -> Reduction:
    """Return the operation and factors that reduce a gradient; `scale` multiplies it."""
    predivide = options.gradient_predivide_factor  # 1 unless the operation is Average
    return Reduction(options.op, 1.0 / predivide, scale * predivide, options.process_set)


class ReductionUnit:
    """Gradients that are reduced in one operation, of parameters on one device; the first name is the operation's."""

    ready: int  # how many of the gradients backward has made
    _direct: Any  # Horovod's handle, if the gradient itself is sent
    _handle: Any
    _is_dense: bool  # False if a sparse gradient was sent
    _flags: list[bool]
    _order: tuple[int, ...] | None  # in which a dense gradient is sent, if it is not that of its dimensions

    def __init__(self, params: list[Parameter], names: list[str], options: ReducerOptions, scale: float) -> None:
        self.params, self.names, self._options = params, names, options
        self._compressor = options.compression
        self.set_scale(scale)
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
        is_alone = len(self.params) == 1 and self._compressor.is_cast
        # By the weight's memory, which is alike on all ranks: a rank may have no gradient, or one with another layout.
        self._order = memory_order(self.params[0]) if is_alone else None
        if is_alone and grad is not None and self._compressor.wire_type(grad.dtype) is grad.dtype:
            sent = grad if self._order is None or grad.is_sparse else in_order(grad, self._order)
            if is_native(sent):
                self._direct = self.how.send(sent, self.names[0])  # the gradient itself; fast, because backward waits
                return
        if self.takes_sparse and (sparse or (grad is not None and grad.is_sparse)):
            grad = no_entries(self.params[0]) if grad is None else grad
            self._handle = sparse_allreduce_async(grad, self.names[0], options.op, options.process_set)
            return
        self._is_dense = True
        # Joined ranks can take part in an allreduce only, and a minimum or a product has no other form.
        compressor = self._compressor
        if compressor.needs_all_ranks and not (options.op in (Average, Sum) and all_active()):
            compressor = NoneCompressor()
        tensors = [dense_gradient(p) for p in self.params]
        if self._order is not None:
            tensors = [in_order(each, self._order) for each in tensors]
        self._handle = compressor.exchange(tensors, self.how, self.names[0], self.names)

    def finish(self, present: Sequence[bool] | None, correction: float) -> None:
        """Wait, and store the results times `correction` where any rank has a gradient (`present`; None: as here)."""
        if self._direct is not None:
            engine.native().synchronize(self._direct)
            grad = self.params[0].grad
            if correction != 1.0 and grad is not None:
                grad.detach().mul_(correction)
            return
        results = self._handle.wait()
        if not self._is_dense:
            self.params[0].grad = (results * (self._scale * correction)).coalesce()
            return
        if self._order is not None:
            results = [from_order(each, self._order) for each in results]
        there = [p.grad is not None for p in self.params] if present is None else present
        if not all(there):  # what was sent for them, such as errors of earlier steps, is not applied
            missing = [name for name, wanted in zip(self.names, there, strict=True) if not wanted]
            self._compressor.rollback(missing)
        for param, result, wanted in zip(self.params, results, there, strict=True):
            if wanted:
                store_gradient(param, result.mul_(correction) if correction != 1.0 else result)

    def advance(self) -> bool:
        """Start the next collective of an exchange that has several; False if there is none."""
        return isinstance(self._handle, Staged) and self._handle.advance()

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
        self._is_dense, self._flags, self._order = False, [], None


def drain(handle: Any) -> None:
    """Wait for an operation whose result is not needed, so that its name is free again."""
    if handle is not None and not handle.is_stale:
        with contextlib.suppress(Exception):  # it failed or was interrupted, which was reported already
            handle.wait()


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
