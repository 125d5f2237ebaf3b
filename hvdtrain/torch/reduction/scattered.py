"""Gradients in shards: each rank gets its part of the mean of a gradient, and frees the whole one.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 2. A gradient is
sent by a reducescatter as soon as backward has made it, and its memory is freed once that has ended. Small gradients
travel in buckets as without shards, and stay whole until the step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hvdtrain.distributed.recorder import recorder
from hvdtrain.torch.ops import pack
from hvdtrain.torch.ops.engine import Handle
from hvdtrain.torch.ops.gather_ops import reducescatter_async
from hvdtrain.torch.reduction.division import Division, flat_gradient
from hvdtrain.torch.reduction.reduction_unit import ReducerOptions, ReductionUnit
from hvdtrain.torch.reduction.sharded import Shards

_MOST_BYTES = 2**24  # of gradients that backward has made and ranks still send
# Backward waits so long for one of them. If ranks make their gradients in different orders, it would wait for ever.
_WAIT_S = 10.0
_POLL_S = 1e-4


class Scatter:
    """The gradients of one optimizer that are being sent to `shards`."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self._kept: dict[Parameter, Tensor] = {}
        self._in_flight: deque[ScatteredUnit] = deque()
        self._waits = True

    def cover(self, parameters: Iterable[Parameter]) -> None:
        """Make room for this rank's parts of these gradients.

        In one piece and for all steps: parts that lie where whole gradients were freed would leave no room for these.
        """
        for alike in pack.alike((p for p in parameters if p not in self._kept), pack.kind):
            lengths = [self.shards.division.length(p.numel()) for p in alike]
            room = torch.empty(sum(lengths), dtype=alike[0].dtype, device=alike[0].device)
            self._kept.update(zip(alike, room.split(lengths), strict=True))

    def renew(self) -> None:
        """Make room for the parts of the present ranks: an elastic job's have changed, and its last step has failed."""
        self.shards.follow_ranks()
        parameters, self._kept = list(self._kept), {}
        self._in_flight.clear()
        self.cover(parameters)

    def keep(self, parameter: Parameter, part: Tensor) -> None:
        """Keep this rank's part of a gradient until the next one."""
        self._kept[parameter].copy_(part.view(-1))

    def kept(self, parameter: Parameter) -> Tensor:
        """Return the part that was kept last."""
        return self._kept[parameter]

    def add(self, unit: ScatteredUnit) -> None:
        """Free the gradients that were sent; `unit` has begun to send its own."""
        self._in_flight.append(unit)
        self._free()

    def make_room(self) -> None:
        """Let backward wait while too much is in flight."""
        if not self._waits or self._bytes() <= _MOST_BYTES:
            return
        with recorder.waiting():
            deadline = time.monotonic() + _WAIT_S
            while self._bytes() > _MOST_BYTES and self._waits:
                time.sleep(_POLL_S)
                if self._free():
                    deadline = time.monotonic() + _WAIT_S
                self._waits = time.monotonic() < deadline

    def _free(self) -> bool:
        """Free gradients in the order in which they were sent; return True if there was one."""
        before = len(self._in_flight)
        while self._in_flight and self._in_flight[0].is_sent():
            self._in_flight.popleft()
        return len(self._in_flight) < before

    def _bytes(self) -> int:
        # The last one may be larger than the limit by itself.
        return sum(unit.params[0].nbytes for unit in list(self._in_flight)[:-1])


class ScatteredUnit(ReductionUnit):
    """The gradient of one parameter, of which each rank gets its part."""

    def __init__(
        self, params: list[Parameter], names: list[str], options: ReducerOptions, scale: float, *, scatter: Scatter
    ) -> None:
        super().__init__(params, names, options, scale)
        self._scatter = scatter

    @property
    def takes_sparse(self) -> bool:
        """False: `start` refuses sparse gradients."""
        return False

    def start(self, all_active: Callable[[], bool], *, sparse: bool = False) -> None:
        """Send the gradient, zeros if there is none; the parameter has none any more."""
        self._drain()
        self.flags()
        (param,), how = self.params, self.how
        sent, context = self._compressor.compress(_rows(param, self._scatter.shards.division))
        factors = (how.prescale_factor, how.postscale_factor)
        part = reducescatter_async(sent, self.names[0], how.op, how.process_set, *factors)
        self._handle = Handle([part], lambda part: self._keep(part, context), self.names[0])
        param.grad = None
        del sent
        self._scatter.add(self)

    def _keep(self, part: Tensor, context: Any) -> None:
        self._scatter.keep(self.params[0], self._compressor.decompress(part, context))

    def is_sent(self) -> bool:
        """Return True if the whole gradient is not needed any more, and free it."""
        if self._handle is None or not self._handle.poll():
            return self._handle is None  # then an error has ended the step
        self._handle.wait()
        return True

    def finish(self, present: Sequence[bool] | None, correction: float) -> None:
        """Wait, and give this rank's part to the shards where any rank has a gradient; see `ReductionUnit.finish`."""
        self._handle.wait()
        if self._flags[0] if present is None else present[0]:
            (param,) = self.params
            part = self._scatter.kept(param)
            self._scatter.shards.gradients[param] = part.mul_(correction) if correction != 1.0 else part


def _rows(parameter: Parameter, division: Division) -> Tensor:
    """Return a weight's gradient, or zeros if it has none, as (ranks, length of a part), with zeros at the end."""
    gradient, length = parameter.grad, division.length(parameter.numel())
    if gradient is None:
        return torch.zeros(division.size, length, dtype=parameter.dtype, device=parameter.device)
    whole = flat_gradient(parameter, gradient.detach())
    missing = division.size * length - len(whole)
    return (torch.cat([whole, whole.new_zeros(missing)]) if missing else whole).view(division.size, length)
