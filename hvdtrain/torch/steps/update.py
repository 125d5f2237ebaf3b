"""One optimizer's part of a step: backward, reduction over ranks, loss scaling, clipping, the update."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hvdtrain.adapter import Fault, Options, Ranks
from hvdtrain.data.sources import Batch
from hvdtrain.distributed import launch_environment
from hvdtrain.distributed.world import World
from hvdtrain.errors import DesyncError, HvdTrainError
from hvdtrain.torch.ops import lazy, names
from hvdtrain.torch.ops.compression import Compression, as_real
from hvdtrain.torch.ops.functions import broadcast_optimizer_state
from hvdtrain.torch.reduction import fused_update
from hvdtrain.torch.reduction.delayed import GradientInFlight, Origin, Reduced
from hvdtrain.torch.reduction.host_mean import HostMean
from hvdtrain.torch.reduction.optimizer import DistributedOptimizer
from hvdtrain.torch.reduction.reducer import FAILED
from hvdtrain.torch.steps import clipping, loss_scaling
from hvdtrain.torch.steps.losses import LossWeights
from hvdtrain.torch.steps.metrics import Totals
from hvdtrain.torch.steps.together import Together, optimizers_by_name


class Update:
    """Reduces the gradients of one optimizer's parameters, and takes its step; or of several, if they are `Together`.

    `loss` is None for a step of the user's own, whose losses bring their counts. One of several has a `name`.
    """

    def __init__(
        self, optimizer: Any, model: nn.Module, *, loss: Any, options: Options, world: World, name: str = ""
    ) -> None:
        self.name = name
        self._suffix = f".{name}" if name else ""
        self._options, self._world, self._device = options, world, torch.device(world.device)
        self.weights = LossWeights(loss, world)
        self.optimizer = optimizer
        self.needs_closure = needs_closure(optimizer)
        self._losses: list[torch.Tensor] = []  # of this evaluation, scaled as their gradients are
        self._names = {parameter: each for each, parameter in names.parameters(model)}
        self._fuses = fused_update.applies_to(type(optimizer))
        self._has_peers = world.size > 1 or launch_environment.reduces_alone()
        self._distributed = self._reduced = self._has_peers and isinstance(optimizer, Together)
        if self._has_peers and not self._distributed and lazy.first(model) is None:
            self._distribute()
        self.in_flight: GradientInFlight | None = None  # for sync=Delayed()
        if options.sync == "Delayed":
            self.in_flight = GradientInFlight(names.parameters(model), options.compression, world)
        self._host_mean: HostMean | None = None
        self._late: Reduced | None = None  # the gradient of the step before, which this step applies
        self._batches: Sequence[Batch] = ()
        self._counts_nothing = False  # no sample counted on any rank: with SyncBatchNorm, gradients are zeros
        self.was_taken: Callable[[], bool] | None = None  # whether the step was; None if no update was tried
        self._everyone = False  # True if ranks wait for each other in this step's forward and backward
        self.is_reducing = False  # from where this rank's gradients are complete to the step's end
        self.scaler = torch.amp.GradScaler(self._device.type, enabled=options.precision == "fp16")

    def _distribute(self) -> None:
        """Reduce the gradients of the optimizer over ranks; its parameters have shapes."""
        compression = getattr(Compression, self._options.compression)
        every = [(name, parameter) for parameter, name in self._names.items()]
        self.optimizer = DistributedOptimizer(self.optimizer, every, compression, self._options.accumulate)
        self.optimizer._hvd_reducer.count_again()
        self._distributed = self._reduced = True
        self.detach()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The optimizer's, in the order of its groups."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def rank_state(self) -> dict[str, NDArray[Any]]:
        """Which gradients travel together, and the largest weight of a sample."""
        held = {f"max.loss_per_sample{self._suffix}": np.array([self.weights.per_sample])}
        if self._distributed and (packed := self.optimizer._hvd_reducer.packed) is not None:
            held[f"max.packed{self._suffix}"] = packed
        return held

    @rank_state.setter
    def rank_state(self, held: dict[str, NDArray[Any]]) -> None:
        packed, per_sample = f"max.packed{self._suffix}", f"max.loss_per_sample{self._suffix}"
        if packed in held and self._distributed:
            self.optimizer._hvd_reducer.packed = held[packed]
        if per_sample in held:
            self.weights.per_sample = float(held[per_sample][0])

    def start(self) -> None:
        """Broadcast the root's optimizer state and precision scaler."""
        if self._has_peers and not self._distributed:
            self._distribute()  # only now lazy modules have shapes
        # A scaler makes its scale when it is first used, which a rank without samples never does.
        self.scaler.scale(torch.zeros((), device=self._device))
        self._host_mean = None  # ranks may have changed
        self.weights.per_sample = 0.0  # ranks begin together, and data may have changed
        if self._distributed:
            broadcast_optimizer_state(self.optimizer, root_rank=0)
            self.scaler.load_state_dict(self._world.broadcast_object(self.scaler.state_dict(), name="scaler"))
        if self.in_flight is not None:
            self.in_flight.share()

    def detach(self) -> None:
        """Let a backward pass send nothing; `synchronize` puts the hooks back, in the first step of a fit.

        Between fits, a rank may compute gradients alone, and another Trainer may train the same parameters.
        """
        if self._distributed:
            self.optimizer._hvd_reducer.detach()

    def reduce_over(self, ranks: Ranks) -> None:
        """Reduce gradients over these ranks, from the next step on; see `Adapter.reduce_over`."""
        self._reduced, self.weights.alone = self._distributed and ranks == "all", ranks != "all"
        if ranks != "host":
            self._host_mean = None
        elif self._host_mean is None and self._world.size > 1:
            self._host_mean = HostMean(self._world)
        if self._distributed and not self._reduced:
            self.optimizer._hvd_reducer.detach()  # backward must send nothing; `synchronize` puts the hooks back

    def begin(self, batches: Sequence[Batch], *, everyone: bool, first: bool) -> LossWeights:
        """Begin a step; with `everyone`, a rank goes backward also over batches of which it has no samples."""
        self.is_reducing = False
        self._everyone = everyone
        self.weights.begin(batches)
        # A rank without samples, or with none that count, adds no gradient: the optimizer reduces zeros for it.
        passes = len(batches) if everyone else sum(1 for each in self.weights.counted if each.weight)
        if self.in_flight is not None:
            self.detach()
            self._batches = batches
        elif self._reduced and passes and (first or passes != self.optimizer.backward_passes_per_step):
            self.optimizer.set_backward_passes_per_step(passes)
        self.optimizer.zero_grad()
        self._losses = []
        return self.weights

    def backward(self, loss: torch.Tensor, factor: float = 1.0) -> None:
        """Add the gradient of a loss times `factor`; one of several optimizers, to its own parameters only."""
        inputs = [p for p in self.parameters if p.requires_grad] if self.name else None
        if self.in_flight is not None and self._checks():
            self._losses.append(loss.detach())
        loss = loss if factor == 1.0 else loss * factor
        if self.needs_closure:
            self._losses.append(loss.detach())
        self.scaler.scale(loss).backward(inputs=inputs)

    def is_refused(self, between_exchanges: Callable[[], None] = lambda: None) -> bool:
        """Reduce, unscale, clip and step; return True where all ranks do not step: the gradient is not finite.

        With `sync=Delayed()`, `between_exchanges` is called when no gradient is in flight.

        Raises RankGaveUp where a rank has called `give_up`.
        """
        self.is_reducing = True
        if self.in_flight is not None:
            self._exchange(self.in_flight, between_exchanges)
        else:
            self._reduce()  # before unscale_ tests for infinity: ranks must agree to skip a step
        return self._refuses()

    def begin_open(self, samples: int) -> float | None:
        """Begin a step of up to so many samples that may close early; see `LossWeights.begin_open`."""
        self.detach()
        self.optimizer.zero_grad()
        return self.weights.begin_open(samples)

    def is_mean_refused(
        self, gradients: dict[nn.Parameter, torch.Tensor], weight: float, samples: int, *, is_cut: bool
    ) -> bool:
        """Step with the mean over ranks of such a step's gradients, or return True, as `is_refused` does."""
        if weight or not is_cut:  # else what was cut off may count
            self.weights.learn(weight, samples)
        self._counts_nothing = not weight
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        return self._refuses()

    def _checks(self) -> bool:
        """Return whether this step is refused if its gradient is not finite."""
        # A scaler skips non-finite steps by itself and lowers its scale, until the scale is 1.
        return bool(self._options.nan_policy) and (not self.scaler.is_enabled() or self.scaler.get_scale() <= 1.0)

    def _refuses(self) -> bool:
        """Take the step with the gradients as they are, or return True; see `is_refused`."""
        optimizer, clip_norm, parameters = self.optimizer, self._options.clip_norm, self.parameters
        is_missing = all(p.grad is None for p in parameters)
        if self.name and not self._counts_nothing:
            self._check_reached()
        if self._counts_nothing or is_missing:
            return False  # momentum and weight decay must not move weights; a scaler does not step without gradients
        if self._checks() and not all_finite([p.grad for p in parameters]):
            return True
        if clip_norm is not None:
            self.scaler.unscale_(optimizer)
            clipping.clip_norm(parameters, clip_norm)
        how = fused_update.chosen(optimizer) if self._fuses else nullcontext()
        with optimizer.skip_synchronize() if self._distributed else how:  # a distributed one fuses by itself
            self.was_taken = loss_scaling.step(self.scaler, optimizer)
        self.scaler.update()
        return False

    def _check_reached(self) -> None:
        """Raise ValueError if the loss has no gradient for a named optimizer: on all ranks, since it is reduced."""
        for name, optimizer in optimizers_by_name(self.optimizer, self.name).items():
            if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
                raise ValueError(
                    f"step yields a loss for {name!r} that reaches no parameter of this optimizer. "
                    "Received: no gradient on any rank. Yield it with the optimizer whose parameters it trains."
                )

    def _exchange(self, in_flight: GradientInFlight, between_exchanges: Callable[[], None]) -> None:
        """Replace this step's gradient by the mean of the step before, and start to reduce this step's."""
        weights = self.weights
        made = Origin(weights.weight, weights.expected, weights.samples, self._scale())
        fault = self._own_fault()
        late = in_flight.take()  # before the next one starts: they have the same names
        self.refuse_sparse("sync=Delayed()", instead="sync=None")
        between_exchanges()
        in_flight.start(self.parameters, made, fault)
        self._put(late)

    def _put(self, late: Reduced | None) -> None:
        """Put a reduced gradient where the optimizer looks for it."""
        self._late = late
        if late is None:
            return
        origin = late.origin
        self.weights.learn(origin.total, origin.samples)
        self._counts_nothing = origin.total == 0
        factor = self._scale() / origin.scale  # the gradient was made at another loss scale
        for parameter, gradient in late.gradients.items():
            if not parameter.requires_grad:  # frozen since the gradient was computed
                continue
            parameter.grad = gradient if factor == 1.0 else gradient.mul_(factor)

    def _scale(self) -> float:
        return float(self.scaler.get_scale()) if self.scaler.is_enabled() else 1.0

    def _own_fault(self) -> Fault | None:
        """Return what is not finite in this rank's gradient, before others add theirs."""
        if not self._checks() or all_finite([p.grad for p in self.parameters]):
            return None
        mean = float(torch.stack(self._losses).mean())
        return Fault("", self._first_non_finite(), mean, self._batches, steps_ago=1, is_late=True)

    def late_fault(self) -> Fault:
        """Return why the gradient of the step before was refused, and drop it."""
        name = self.drop_gradients()
        own = None if self._late is None else self._late.fault
        if own:
            return replace(own, reduced=name)
        is_restored = self._late is not None and self._late.is_restored
        return Fault(name, None, float("nan"), (), steps_ago=1, is_late=True, is_restored=is_restored)

    def _first_non_finite(self) -> str:
        return self.name_of(first_non_finite((p, p.grad) for p in self.parameters)) or "none"

    def name_of(self, parameter: nn.Parameter | None) -> str | None:
        """Return a parameter's name."""
        return None if parameter is None else self._names[parameter]

    def refuse_sparse(self, feature: str, *, instead: str) -> None:
        """Raise HvdTrainError if a gradient is sparse, for a feature that averages dense ones only."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise HvdTrainError(
                    f"{feature} averages dense gradients. Received: a sparse gradient of "
                    f"{self.name_of(parameter)} on rank {self._world.rank}. Use "
                    f"Embedding(sparse=False), or {instead}."
                )

    def drop_gradients(self) -> str:
        """Drop the gradients of a step that was refused; return the first parameter whose gradient is not finite."""
        name = self._first_non_finite()
        self.optimizer.zero_grad()
        return name

    def finish(self) -> Fault | None:
        """Apply the last step's gradient, which no later step will; return why it was refused."""
        assert self.in_flight is not None
        self.optimizer.zero_grad()
        self._counts_nothing = False
        self._put(self.in_flight.take())
        fault = replace(self.late_fault(), steps_ago=0) if self._refuses() else None
        self.optimizer.zero_grad()
        return fault

    def _reduce(self) -> float:
        """Average the gradients over ranks; return the factor that corrects their scale, which holds for losses too."""
        weights = self.weights
        if self._reduced:
            total = self.optimizer.synchronize(weight=weights.weight, expected=weights.expected)
            if total == FAILED:
                raise RankGaveUp
            weights.learn(total)
        else:
            weights.correct(self.parameters)
            if self._host_mean is not None:
                self.refuse_sparse('LocalSGD(within="host")', instead="within=None")
                self._host_mean.average(self.parameters)
            total = weights.weight
            if weights.alone:
                self._fill_gradients()
                total = None  # if nothing counts here, it does on another rank
        self._counts_nothing = total == 0
        return weights.expected / total if total else 1.0

    def _fill_gradients(self) -> None:
        """Give a rank that has no gradient one of zeros: momentum and weight decay change as on the other ranks."""
        parameters = [p for p in self.parameters if p.requires_grad]
        if all(p.grad is None for p in parameters):
            known = [p for p in parameters if self.optimizer.state.get(p)]  # others may be trained on no rank
            # SparseAdam refuses dense gradients.
            layout = torch.sparse_coo if isinstance(self.optimizer, torch.optim.SparseAdam) else None
            for parameter in known or parameters:
                parameter.grad = torch.zeros_like(parameter, layout=layout)

    @property
    def can_give_up(self) -> bool:
        """True if other ranks wait for this rank's gradients in the same step, and learn there that it gives up."""
        return self._reduced and self.in_flight is None and not (self.is_reducing or self._everyone)

    def give_up(self) -> None:
        """Take part in the step's collectives without this rank's gradients; no rank takes the step."""
        self.weights.give_up()
        if self._reduced:
            self.optimizer.synchronize(weight=FAILED)

    def search(self, evaluate: Callable[[bool], None]) -> None:
        """Take the step of an optimizer that needs a closure, such as LBFGS.

        It calls `evaluate(again)`, which goes forward and backward over the step's batches, as often as it likes. Ranks
        call it equally often, because each call gives all of them the same gradient and loss, bit for bit.
        """
        numbers = itertools.count()

        @torch.enable_grad()
        def closure() -> torch.Tensor:
            again = next(numbers) > 0
            if again:
                self._agree(again=True)
            evaluate(again)
            loss = np.array([sum(map(float, self._losses)) * self._reduce()])
            if self._world.size > 1:
                loss = self._world.allreduce(loss, "mean", name="closure.loss")
            return torch.from_numpy(loss)[0]

        with self.optimizer.skip_synchronize() if self._reduced else nullcontext():
            self.optimizer.step(closure)
        self._agree(again=False)

    def _agree(self, *, again: bool) -> None:
        """Raise DesyncError on every rank, unless all of them evaluate again, or none."""
        if self._world.size > 1 and self._world.allreduce(np.array([again]) * 1.0, "mean", name="closure")[0] != again:
            raise DesyncError(
                "Ranks evaluate a step's loss a different number of times: their weights differ, or the arithmetic of "
                f"their devices. Received: {'one more' if again else 'no more'} on rank {self._world.rank}. Use equal "
                "hosts, or an optimizer that needs no closure."
            )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` of a plain optimizer needs a closure that computes loss and gradient, as LBFGS's does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class RankGaveUp(Exception):  # noqa: N818 - caught by whoever repeats the step
    """Another rank has given up this step: it ran out of memory, or refuses its loss."""


def all_finite(gradients: Sequence[torch.Tensor | None]) -> bool:
    """Return whether every element is finite; gradients that are None are left out."""
    dense = [as_real((g._values() if g.is_sparse else g).detach()) for g in gradients if g is not None]
    if not dense:
        return True
    if all(g.is_cuda and g.numel() for g in dense):  # one launch for many; on CPUs it takes ten times as long
        return bool(_stack(torch._foreach_norm(dense, float("inf"))).isfinite().all())
    # A sum costs a fiftieth of a test of each element, which follows where one is not finite: it may have overflowed.
    sums = _stack([g.sum(dtype=torch.float32) for g in dense])
    return bool(sums.isfinite().all()) or all(bool(g.isfinite().all()) for g in dense)


def _stack(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return them as one tensor; those of a spread model are on several devices."""
    return torch.stack([each.to(numbers[0].device) for each in numbers])


def first_non_finite(gradients: Iterable[tuple[nn.Parameter, torch.Tensor | None]]) -> nn.Parameter | None:
    """Return the first parameter whose gradient is not finite."""
    return next((parameter for parameter, gradient in gradients if not all_finite([gradient])), None)


class BufferSnapshot:
    """What a step changes before its gradient is known: the model's buffers, and what metrics have counted."""

    def __init__(self, model: nn.Module, totals: Totals) -> None:
        self._totals = totals
        self._by_name = [module._buffers for module in model.modules() if module._buffers]
        self._tensors: list[torch.Tensor] = []
        self._saved: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self) -> None:
        """Save the state before a step."""
        # By name too: `self.mean = 0.9 * self.mean + ...` in forward puts another tensor in the buffer's place.
        self._names = [dict(held) for held in self._by_name]
        tensors = [each for named in self._names for each in named.values() if each is not None]
        tensors.append(self._totals.sums)
        memory = dict(zip(map(id, self._tensors), self._saved, strict=True))
        self._saved = [memory[id(t)].copy_(t) if id(t) in memory else t.detach().clone() for t in tensors]
        self._tensors = tensors
        self._counts = list(self._totals.counts)
        self._undo = self._totals.stateful.snapshot()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore that state."""
        for held, named in zip(self._by_name, self._names, strict=True):
            held.update(named)
        for saved, tensor in zip(self._saved, self._tensors, strict=True):
            tensor.copy_(saved)
        self._totals.counts = list(self._counts)
        self._undo()
