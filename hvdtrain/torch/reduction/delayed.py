"""The gradient in flight of `sync=Delayed()`: it is reduced while the next step computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from hvdtrain.adapter import Fault
from hvdtrain.distributed.recorder import recorder
from hvdtrain.torch.ops import dtypes, engine
from hvdtrain.torch.ops.compression import Compressor
from hvdtrain.torch.ops.functions import broadcast_parameters
from hvdtrain.torch.ops.names import parameters_of
from hvdtrain.torch.ops.submit import Reduction, submit
from hvdtrain.torch.reduction.exchange import Applied, DenseOnly, Exchange, Made
from hvdtrain.torch.reduction.gradient_exchange import GradientExchange
from hvdtrain.torch.reduction.reduction_unit import drain
from hvdtrain.torch.reduction.weighted_mean import WeightedMean

_PREFIX, _META = "sync.gradient.", "delayed"  # in `State.arrays` and `State.meta`


@dataclass
class Origin:
    """Numbers of the step that computed a gradient; equal on all ranks once it is reduced."""

    # This rank's weight, and after the reduction the sum over ranks; None where all ranks know that sum beforehand.
    total: float | None
    expected: float  # the sum for which losses were scaled
    samples: int  # of the step, over all ranks
    scale: float  # of its loss scaling


@dataclass
class Reduced:
    """The mean gradient of a step, equal on all ranks; a parameter without a gradient on any rank is left out."""

    origin: Origin
    gradients: dict[Parameter, Tensor]
    fault: Fault | None = None  # why this rank's own gradient is not finite
    is_restored: bool = False  # from a checkpoint, which has no fault


class Delayed(Exchange):
    """Averages the gradients of a step while the next step computes.

    `finish` starts to reduce the gradients of this step, and puts the mean of the step before in their place. It sends
    a dense gradient for each parameter of the optimizer that is trained, a missing one as zeros: what is sent must not
    depend on the step. With it travel this rank's weight in the mean, and flags of the gradients that it has.

    Args:
        optimizer: plain or distributed; its hooks send nothing.
        compressor: bound to the parameters.
        between_exchanges: called when no gradient is in flight, so that other collectives do not wait for one.
    """

    def __init__(
        self, optimizer: Any, compressor: Compressor, dense_only: DenseOnly, between_exchanges: Callable[[], None]
    ) -> None:
        self.compressor = compressor
        self._optimizer, self._dense_only, self._between_exchanges = optimizer, dense_only, between_exchanges
        self._names, self._world = dense_only.names, dense_only.world
        self._sent: _Sent | None = None
        self._reduced: Reduced | None = None

    def start(self) -> None:
        """Give all ranks the root's gradient; a collective."""
        if self._sent is not None and self._sent.is_stale:
            self._drop()
        try:
            mine = self._wait()
        except Exception:  # noqa: BLE001 - of a fit that an error has ended
            mine = None
        super().start()  # only now no exchange changes the compressor's memory
        described = None
        if mine is not None:
            described = asdict(mine.origin), [self._names[p] for p in mine.gradients], mine.is_restored
        found = self._world.broadcast_object(described, name="delayed")
        self._reduced = None
        if found is None:
            return
        origin, names, is_restored = found
        by_name = {name: parameter for parameter, name in self._names.items()}
        gradients = {} if mine is None else mine.gradients
        shared = {
            by_name[name]: gradients[by_name[name]] if self._world.is_root else torch.zeros_like(by_name[name]).detach()
            for name in names
        }
        if self._world.size > 1:
            broadcast_parameters([(f"delayed.{self._names[p]}", each) for p, each in shared.items()], root_rank=0)
        self._reduced = Reduced(Origin(**origin), shared, None if mine is None else mine.fault, is_restored)

    def begin(self, passes: int, *, first: bool) -> None:
        """Let backward send nothing."""
        self.detach()

    def finish(self, made: Made) -> Applied:
        """Start to reduce this step's gradients, and put the mean of the step before."""
        weights, parameters = made.weights, parameters_of(self._optimizer)
        origin = Origin(weights.weight, weights.expected, weights.samples, made.scale())
        fault = made.find_fault()
        late = self._take()  # before the next one starts: they have the same names
        self._dense_only.check(parameters)
        self._between_exchanges()
        self._send(parameters, origin, fault)
        return self._put(late, made)

    def flush(self, made: Made) -> Applied | None:
        """Put the gradient of the last step, which no later step will apply."""
        self._optimizer.zero_grad()
        applied = self._put(self._take(), made)
        return replace(applied, fault=applied.fault and replace(applied.fault, steps_ago=0))

    def _send(self, parameters: Sequence[Parameter], origin: Origin, fault: Fault | None) -> None:
        """Take the gradients from these parameters, which are dense, and start to average them over ranks."""
        names = {p: self._names[p] for p in parameters if p.requires_grad}
        ranks = engine.global_set(self._world.data_set)
        self._sent = _Sent(names, origin, fault, self.compressor, ranks)

    def _take(self) -> Reduced | None:
        """Wait for the gradient in flight and return it, for the caller to keep; None before the first step."""
        reduced, self._reduced = self._wait(), None
        return reduced

    def _wait(self) -> Reduced | None:
        sent, self._sent = self._sent, None
        if sent is not None:
            with recorder.waiting():
                self._reduced = sent.wait()
        return self._reduced

    def _drop(self) -> None:
        """Drop the gradient. Wait for its reduction, whose names and memory are needed again."""
        sent, self._sent, self._reduced = self._sent, None, None
        if sent is not None:
            sent.drain()

    def _put(self, late: Reduced | None, made: Made) -> Applied:
        """Put a reduced gradient where the optimizer looks for it."""
        must_undo = self._sent is not None and self._sent.fault is not None
        if late is None:
            return Applied(must_undo=must_undo)
        origin = late.origin
        made.weights.learn(origin.total, origin.samples)
        factor = made.scale() / origin.scale  # the gradient was made at another loss scale
        for parameter, gradient in late.gradients.items():
            if not parameter.requires_grad:  # frozen since the gradient was computed
                continue
            parameter.grad = gradient if factor == 1.0 else gradient.mul_(factor)
        unknown = Fault("", None, float("nan"), (), steps_ago=1, is_late=True, is_restored=late.is_restored)
        return Applied(origin.total == 0, fault=late.fault or unknown, must_undo=must_undo)

    def detach(self) -> None:
        """Remove the reducer's hooks."""
        if hasattr(self._optimizer, "_hvd_reducer"):
            self._optimizer._hvd_reducer.detach()

    @property
    def packed(self) -> NDArray[Any] | None:
        """Flags of the reducer, for a later run without a delay that resumes from this one's checkpoint."""
        flags: NDArray[Any] | None = getattr(getattr(self._optimizer, "_hvd_reducer", None), "packed", None)
        return flags

    @packed.setter
    def packed(self, flags: NDArray[Any] | None) -> None:
        if hasattr(self._optimizer, "_hvd_reducer"):
            self._optimizer._hvd_reducer.packed = flags

    @property
    def rank_state(self) -> dict[str, NDArray[Any]]:
        """See `Exchange.rank_state`; this rank alone waits for a gradient in flight that changes the memory."""
        if self.compressor.has_memory:
            self._wait()
        return super().rank_state

    @rank_state.setter
    def rank_state(self, held: Mapping[str, NDArray[Any]]) -> None:
        self._set_rank_state(held)

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the gradient in flight; this rank alone waits for it."""
        reduced = self._wait()
        if reduced is None:
            return {}, {}
        arrays = {f"{_PREFIX}{self._names[p]}": dtypes.to_array(each) for p, each in reduced.gradients.items()}
        return arrays, {_META: asdict(reduced.origin)}

    def load(self, arrays: Mapping[str, NDArray[Any]], meta: dict[str, Any]) -> None:
        """Restore it. A checkpoint of a run with another strategy has no gradient."""
        self._drop()
        if _META not in meta:
            return
        saved = {name.removeprefix(_PREFIX): a for name, a in arrays.items() if name.startswith(_PREFIX)}
        known = [(p, name) for p, name in self._names.items() if name in saved]
        gradients = {p: torch.from_numpy(saved[name].copy()).to(p.device, p.dtype) for p, name in known}
        self._reduced = Reduced(Origin(**meta[_META]), gradients, is_restored=True)


class _Sent:
    """The operations in flight that reduce one gradient."""

    def __init__(
        self, names: dict[Parameter, str], origin: Origin, fault: Fault | None, compressor: Compressor, ranks: Any
    ) -> None:
        self._parameters, self._origin, self.fault = (parameters := list(names)), origin, fault
        self._names, self._compressor = names, compressor
        self._mean = WeightedMean([float(p.grad is not None) for p in parameters], origin.total, origin.expected)
        numbers = torch.tensor(self._mean.numbers, dtype=torch.float64, device="cpu")
        how = Reduction(engine.Sum, process_set=ranks)
        self._numbers = submit([numbers], how, "delayed.numbers", in_place=True, counted=False)
        gradients = [torch.zeros_like(p).detach() if p.grad is None else p.grad.detach() for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        how = Reduction(engine.Average, process_set=ranks)
        named = list(names.values())
        self._exchange = GradientExchange(gradients, how, name="delayed", compressor=compressor, names=named)

    @property
    def is_stale(self) -> bool:
        """True if Horovod was shut down since, as an elastic job does when ranks change."""
        return self._numbers.is_stale

    def wait(self) -> Reduced:
        """Wait for the mean, corrected for the sum of the ranks' weights."""
        self._mean.receive(self._numbers.wait()[0].tolist())
        means = list(zip(self._parameters, self._exchange.wait(), self._mean.flags, strict=True))
        gradients = {parameter: mean for parameter, mean, there in means if there}
        self._compressor.rollback([self._names[parameter] for parameter, _, there in means if not there])
        # Also of a step that will be refused: the next gradient is sent before all ranks refuse this one.
        self._compressor.commit()
        if (correction := self._mean.correction()) != 1.0:
            for each in gradients.values():
                each.mul_(correction)
        return Reduced(replace(self._origin, total=self._mean.weight), gradients, self.fault)

    def drain(self) -> None:
        """Wait without a result."""
        drain(self._numbers)
        self._exchange.drain()
