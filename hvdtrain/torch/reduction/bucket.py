"""Small gradients that are sent as one tensor: one negotiation and one reduction for all of them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.ops import engine, pack, wire
from hvdtrain.torch.reduction.reduction_unit import ReducerOptions, ReductionUnit, dense_gradient, store_gradient


def can_pack(options: ReducerOptions) -> bool:
    """Return whether gradients may travel together: in buckets, or by one exchange of a compressor."""
    compressor = options.compression
    return options.groups in (None, 0) and (compressor.is_cast or compressor.bucket_bytes > 0)


def _wire_type(param: Parameter, options: ReducerOptions) -> torch.dtype:
    return wire.reduced_as(options.compression.wire_type(param.dtype))


def can_carry_flags(param: Parameter, options: ReducerOptions) -> bool:
    """Return whether a bucket can carry counts: on a GPU the host would wait for them; float16 counts to 2048 only."""
    return param.device.type == "cpu" and _wire_type(param, options) in (torch.float32, torch.float64)


def _kinds(params: Sequence[Parameter]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(param.shape, param.dtype) for param in params]


class Bucket(ReductionUnit):
    """Gradients of one type and device, dense on all ranks, in one tensor; `header` numbers travel in front of them."""

    def __init__(
        self, params: list[Parameter], names: list[str], options: ReducerOptions, scale: float, *, header: int = 0
    ) -> None:
        super().__init__(params, names, options, scale)
        self._header_length = header
        self._place()
        # Ranks agree on the order of dimensions in memory when they begin. One whose weights were moved since would
        # add up numbers that do not belong together: it waits for an operation of its own name, and says so.
        orders = [wire.memory_order(param) for param in params]
        self._name = f"{names[0]}.bucket" + (f".{zlib.crc32(repr(orders).encode()):08x}" if any(orders) else "")

    def _place(self) -> None:
        """Make room for gradients of the types that the parameters have now."""
        params, header = self.params, self._header_length
        self._kinds = _kinds(params)
        dtypes = {param.dtype for param in params}
        counts = [torch.float32] if header else []  # what a number of the header is at least
        wire_type = functools.reduce(torch.promote_types, [*(_wire_type(p, self._options) for p in params), *counts])
        self._flat = torch.zeros(header + sum(p.numel() for p in params), dtype=wire_type, device=params[0].device)
        # In NumPy, where a small operation costs a tenth of torch's.
        self._header = self._flat[:header].numpy() if header else np.zeros(0)
        # The reduced gradients in their own type, in which they may still be multiplied.
        own = params[0].dtype if len(dtypes) == 1 else wire_type
        self._result = self._flat if own is wire_type else torch.zeros_like(self._flat, dtype=own)
        self.nbytes = self._flat.nbytes + (0 if self._result is self._flat else self._result.nbytes)
        self._views, self._results = (pack.places(flat[header:], params) for flat in (self._flat, self._result))

    def _whole(self) -> list[Tensor] | None:
        """Return the gradients if all are there and dense, as in nearly all steps; else None."""
        whole = [grad for param in self.params if (grad := param.grad) is not None and not grad.is_sparse]
        return whole if len(whole) == len(self.params) else None

    def flags(self) -> list[bool]:
        """Return two flags per parameter; see `ReductionUnit.flags`."""
        if not self._flags and self._whole() is not None:
            self._flags = [True, False] * len(self.params)
        return super().flags()

    @torch.no_grad()  # gradients have histories after a backward with create_graph=True
    def start(self, all_active: Callable[[], bool], *, sparse: bool = False, numbers: Sequence[float] = ()) -> None:
        """Send the gradients, with `numbers` in front of them; a missing one as zeros, a sparse one as a dense one."""
        self._drain()
        self.flags()
        if _kinds(self.params) != self._kinds:
            self._check_shapes()
            self._place()  # as after model.double()
        if numbers:
            self._header[:] = numbers
        torch._foreach_copy_(self._views, self._whole() or [dense_gradient(p) for p in self.params])
        self._direct = self.how.send(self._flat, self._name)

    def _check_shapes(self) -> None:
        for name, param, (shape, _) in zip(self.names, self.params, self._kinds, strict=True):
            if param.shape != shape:
                shapes = f"Received: {tuple(param.shape)}, was {tuple(shape)}. Make a new DistributedOptimizer."
                raise HvdTrainError(f"{name} changed its shape after the first step. {shapes}")

    def exchange(self, numbers: Sequence[float], all_active: Callable[[], bool]) -> list[float]:
        """Send the gradients with `numbers` in front of them, and return those reduced."""
        self.start(all_active, numbers=numbers)
        engine.native().synchronize(self._direct)
        received: list[float] = self._header.tolist()
        return received

    @torch.no_grad()
    def finish(self, present: Sequence[bool] | None, correction: float) -> None:
        """Wait, and copy the results into the gradients; see `ReductionUnit.finish`."""
        engine.native().synchronize(self._direct)  # at once, where `exchange` has waited already
        if self._result is not self._flat:
            self._result.copy_(self._flat)
        if correction != 1.0:
            self._result.mul_(correction)
        whole = self._whole()
        if whole is not None and (present is None or all(present)):
            torch._foreach_copy_(whole, self._results)
            return
        for index, (param, result) in enumerate(zip(self.params, self._results, strict=True)):
            if param.grad is not None if present is None else present[index]:
                # A copy where there is no gradient yet, because the next step overwrites the bucket.
                store_gradient(param, result.clone() if param.grad is None else result)
