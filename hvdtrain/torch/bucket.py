"""Small gradients that are sent as one tensor: one negotiation and one reduction for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from hvdtrain.errors import HvdTrainError
from hvdtrain.torch import engine, wire
from hvdtrain.torch.units import Unit, dense_gradient, drain, store_gradient

if TYPE_CHECKING:
    from hvdtrain.torch.reducer import ReducerOptions

# A gradient below the first is cheaper to copy than to send alone: 20 us of Python and a negotiation against two passes
# through the cache. A bucket is sent when it is full.
_SMALL_BYTES = 2**18
_BUCKET_BYTES = 2**20
# The last bucket of backward is waited for by everybody, whatever it holds: little of what could have gone before.
_LAST_BYTES = 2**15


def pack(params: Iterable[Parameter]) -> list[list[Parameter]]:
    """Return the small ones among `params` in buckets of one type and device, in about the order of backward.

    Depends on the order of `params`, their shapes, types and devices alone, and so is the same on all ranks.
    """
    buckets: dict[tuple[torch.dtype, torch.device], list[list[Parameter]]] = {}
    for param in reversed(list(params)):
        if param.nbytes >= _SMALL_BYTES or not wire.is_native_type(param.dtype):
            continue
        alike = buckets.setdefault((param.dtype, param.device), [[]])
        if sum(p.nbytes for p in alike[-1]) + param.nbytes > _BUCKET_BYTES:
            alike.append([])
        alike[-1].append(param)
    packed = [bucket for alike in buckets.values() for bucket in alike if len(bucket) > 1]
    return packed[:-1] + _split_end(packed[-1]) if packed else []


def _split_end(params: list[Parameter]) -> list[list[Parameter]]:
    """Return a bucket in two: the second with what backward makes last, of `_LAST_BYTES` at most if it can be."""
    room, first = _LAST_BYTES, len(params)
    while first > 0 and (room := room - params[first - 1].nbytes) >= 0:
        first -= 1
    first = min(first, len(params) - 1)
    return [params[:first], params[first:]] if first > 0 else [params]


def can_tell(param: Parameter) -> bool:
    """Return whether a bucket of gradients such as this one's can carry counts.

    On a GPU reading them would make the host wait for the device, and float16 counts to 2048 only.
    """
    return param.device.type == "cpu" and param.dtype in (torch.float32, torch.float64)


class Bucket(Unit):
    """Gradients of one type and device, dense on all ranks, copied into one tensor and back.

    Args:
        params: see `Unit`.
        names: see `Unit`.
        options: see `Unit`.
        scale: see `Unit`.
        header: how many further numbers travel in front of the gradients, reduced as those are.
    """

    def __init__(
        self, params: list[Parameter], names: list[str], options: ReducerOptions, scale: float, *, header: int = 0
    ) -> None:
        super().__init__(params, names, options, scale)
        sizes = [p.numel() for p in params]
        self._flat = torch.zeros(header + sum(sizes), dtype=params[0].dtype, device=params[0].device)
        self._header = self._flat[:header]
        views = self._flat[header:].split(sizes)
        self._views = [view.view(p.shape) for view, p in zip(views, params, strict=True)]

    def start(self, all_active: Callable[[], bool], *, sparse: bool = False) -> None:
        """Send the gradients; a missing one as zeros, a sparse one as a dense one."""
        self._let_go()
        self._flags = self.flags()
        for name, param, view in zip(self.names, self.params, self._views, strict=True):
            if param.shape != view.shape:
                raise HvdTrainError(
                    f"{name} changed its shape after the first step. Received: {tuple(param.shape)}, was "
                    f"{tuple(view.shape)}. Make a new DistributedOptimizer when parameters change."
                )
        with torch.no_grad():
            torch._foreach_copy_(self._views, [dense_gradient(p) for p in self.params])
        how = self._how
        self._direct = engine.native().allreduce_async_(
            self._flat,
            name=f"{self.names[0]}.bucket",
            op=how.op,
            prescale_factor=how.prescale_factor,
            postscale_factor=how.postscale_factor,
            process_set=how.process_set,
        )

    def write_header(self, numbers: Sequence[float]) -> Tensor:
        """Put `numbers` in front of the gradients; return where their sums will stand after `wait`."""
        self._let_go()
        self._header.copy_(torch.tensor(numbers))
        return self._header

    def _let_go(self) -> None:
        """Wait for what an abandoned step still has under way, which would write over the next one's numbers."""
        drain(self._abandoned)
        self._abandoned = None

    def wait(self) -> None:
        """Wait until the bucket is reduced; again is no wait."""
        engine.native().synchronize(self._direct)

    def finish(self, present: Sequence[bool] | None, correction: float) -> None:
        """Wait, and copy the results into the gradients; see `Unit.finish`."""
        self.wait()
        if correction != 1.0:
            self._flat.mul_(correction)
        gradients: list[Tensor] = []
        results: list[Tensor] = []
        for index, (param, result) in enumerate(zip(self.params, self._views, strict=True)):
            grad = param.grad
            if not (grad is not None if present is None else present[index]):
                continue
            if grad is not None and not grad.is_sparse:
                gradients.append(grad)
                results.append(result)
            else:
                # One that was missing becomes a tensor of its own: the next step writes over the bucket.
                store_gradient(param, result.clone())
        if gradients:
            with torch.no_grad():
                torch._foreach_copy_(gradients, results)
