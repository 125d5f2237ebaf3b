"""One optimizer's part of a step: backward, reduction over ranks, loss scaling, clipping, the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hvdtrain.adapter import Fault, Options, Ranks
from hvdtrain.data.sources import Batch
from hvdtrain.distributed import launch_environment
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import World
from hvdtrain.torch.ops import lazy, names
from hvdtrain.torch.ops.compression import resolve
from hvdtrain.torch.ops.finite import all_finite, first_non_finite
from hvdtrain.torch.ops.functions import broadcast_optimizer_state
from hvdtrain.torch.ops.names import parameters_of
from hvdtrain.torch.reduction import fused_update
from hvdtrain.torch.reduction.alone import Alone
from hvdtrain.torch.reduction.delayed import Delayed
from hvdtrain.torch.reduction.exchange import Applied, DenseOnly, Exchange, Made
from hvdtrain.torch.reduction.host_mean import HostMean
from hvdtrain.torch.reduction.loss_weights import LossWeights
from hvdtrain.torch.reduction.optimizer import DistributedOptimizer
from hvdtrain.torch.reduction.overlapped import Overlapped
from hvdtrain.torch.steps import clipping, closure, loss_scaling
from hvdtrain.torch.steps.together import Together, optimizers_by_name

_PER_SAMPLE = "max.loss_per_sample"  # in rank_state


class Update:
    """Reduces the gradients of one optimizer's parameters, and takes its step; or of several, if they are `Together`.

    `loss` is None for a step of the user's own, whose losses bring their counts. One of several has a `name`.
    """

    def __init__(
        self,
        optimizer: Any,
        model: nn.Module,
        *,
        loss: Any,
        options: Options,
        world: World,
        name: str = "",
    ) -> None:
        self.name = name
        self.optimizer = optimizer
        self.needs_closure = closure.needs_closure(optimizer)
        self.weights = LossWeights(loss, world)
        self.scaler = torch.amp.GradScaler(torch.device(world.device).type, enabled=options.precision == "fp16")
        self.was_taken: Callable[[], bool] | None = None  # whether the step was; None if no update was tried
        self.is_reducing = False  # from where this rank's gradients are complete to the step's end
        self._options, self._world = options, world
        self._names = {parameter: each for each, parameter in names.parameters(model)}
        self._losses: list[torch.Tensor] = []  # of this step; with a closure, scaled as their gradients are
        self._everyone = False  # True if ranks wait for each other in this step's forward and backward
        self.exchange: Exchange = Alone(optimizer)
        self._exchanges: dict[Ranks, Exchange] = {}  # none until lazy modules have shapes
        if lazy.first(model) is None:
            self._make_exchanges()

    def _make_exchanges(self) -> None:
        """Make the optimizer reduce over ranks, if there are any; its parameters have shapes."""
        options, world = self._options, self._world
        has_peers = DataRanks(world).size > 1 or launch_environment.reduces_alone()
        if has_peers and not isinstance(self.optimizer, Together):
            every = [(name, parameter) for parameter, name in self._names.items()]
            how = (every, options.compression, options.accumulate)
            self.optimizer = DistributedOptimizer(self.optimizer, *how, process_set=world.data_set)
            self.optimizer._hvd_reducer.count_again()
        every_step: Exchange = Overlapped(self.optimizer) if has_peers else Alone(self.optimizer)
        within = self.dense_only('LocalSGD(within="host")', instead="within=None")
        by_host = HostMean(self.optimizer, within, world)
        self._exchanges = {"all": every_step, "host": by_host, "none": Alone(self.optimizer)}
        self.exchange = every_step
        if not isinstance(self.optimizer, Together):
            self.detach()

    def delay(self, between_exchanges: Callable[[], None]) -> None:
        """Apply each step's gradient in the step after it; see `Adapter.delay`."""
        compressor = resolve(self._options.compression).bind(list(self._names.values()))
        dense = self.dense_only("sync=Delayed()", instead="sync=None")
        self.exchange = self._exchanges["all"] = Delayed(self.optimizer, compressor, dense, between_exchanges)

    def dense_only(self, feature: str, *, instead: str) -> DenseOnly:
        """Return a check for a feature that averages dense gradients only."""
        return DenseOnly(feature, instead, self._names, self._world)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The optimizer's, in the order of its groups."""
        return parameters_of(self.optimizer)

    @property
    def rank_state(self) -> dict[str, NDArray[Any]]:
        """The largest weight of a sample, and what the exchange of all ranks keeps on this rank."""
        held = {_PER_SAMPLE: np.array([self.weights.per_sample])}
        if self._exchanges:
            held |= self._exchanges["all"].rank_state
        return {f"{key}{self._suffix}": array for key, array in held.items()}

    @rank_state.setter
    def rank_state(self, held: dict[str, NDArray[Any]]) -> None:
        suffix = self._suffix
        own = {key.removesuffix(suffix): array for key, array in held.items() if key.endswith(suffix)}
        if self._exchanges:
            self._exchanges["all"].rank_state = own
        if _PER_SAMPLE in own:
            self.weights.per_sample = float(own[_PER_SAMPLE][0])

    @property
    def _suffix(self) -> str:
        return f".{self.name}" if self.name else ""

    def start(self) -> None:
        """Broadcast the root's optimizer state and precision scaler."""
        if not self._exchanges:
            self._make_exchanges()  # only now lazy modules have shapes
        # A scaler makes its scale when it is first used, which a rank without samples never does.
        self.scaler.scale(torch.zeros((), device=self._world.device))
        self.weights.per_sample = 0.0  # ranks begin together, and data may have changed
        if self._world.size > 1 or launch_environment.reduces_alone():
            broadcast_optimizer_state(self.optimizer, root_rank=0)
            self.scaler.load_state_dict(self._world.broadcast_object(self.scaler.state_dict(), name="scaler"))
        for each in self._exchanges.values():
            each.start()

    def detach(self) -> None:
        """Let a backward pass send nothing; `synchronize` puts the hooks back, in the first step of a fit.

        Between fits, a rank may compute gradients alone, and another Trainer may train the same parameters.
        """
        for each in self._exchanges.values():
            each.detach()

    def reduce_over(self, ranks: Ranks) -> None:
        """Reduce gradients over these ranks, from the next step on; see `Adapter.reduce_over`."""
        self.exchange, self.weights.alone = self._exchanges[ranks], ranks != "all"
        if ranks != "all":
            self.detach()

    def begin(self, batches: Sequence[Batch], *, everyone: bool, first: bool) -> LossWeights:
        """Begin a step; with `everyone`, a rank goes backward also over batches of which it has no samples."""
        self.is_reducing = False
        self._everyone = everyone
        self.weights.begin(batches)
        # A rank without samples, or with none that count, adds no gradient: the optimizer reduces zeros for it.
        passes = len(batches) if everyone else sum(1 for each in self.weights.counted if each.weight)
        self.exchange.begin(passes, first=first)
        self.optimizer.zero_grad()
        self._losses = []
        return self.weights

    def backward(self, loss: torch.Tensor, factor: float = 1.0) -> None:
        """Add the gradient of a loss times `factor`; one of several optimizers, to its own parameters only."""
        inputs = [p for p in self.parameters if p.requires_grad] if self.name else None
        plain, loss = loss, loss if factor == 1.0 else loss * factor
        self._losses.append((loss if self.needs_closure else plain).detach())
        self.scaler.scale(loss).backward(inputs=inputs)

    def apply(self, batches: Sequence[Batch]) -> Applied:
        """Reduce, unscale, clip and step. RankGaveUp where a rank has called `give_up`."""
        applied = self.reduce(batches)
        return replace(applied, is_refused=self._refuses(applied))

    def reduce(self, batches: Sequence[Batch]) -> Applied:
        """Replace the gradients by their mean, before `unscale_` tests them: ranks must agree to skip a step."""
        self.is_reducing = True
        return self.exchange.finish(self._made(batches))

    def _made(self, batches: Sequence[Batch]) -> Made:
        return Made(self.weights, self._scale, lambda: self._own_fault(batches))

    def begin_open(self, samples: int) -> float | None:
        """Begin a step of up to so many samples that may close early; see `LossWeights.begin_open`."""
        self.detach()
        self.optimizer.zero_grad()
        self._losses = []
        return self.weights.begin_open(samples)

    def is_mean_refused(
        self, gradients: dict[nn.Parameter, torch.Tensor], weight: float, samples: int, *, is_cut: bool
    ) -> bool:
        """Step with the mean over ranks of such a step's gradients; return True if all ranks refuse it."""
        if weight or not is_cut:  # else what was cut off may count
            self.weights.learn(weight, samples)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        return self._refuses(Applied(not weight))

    def search(self, evaluate: Callable[[bool], None]) -> None:
        """Take the step of an optimizer that needs a closure.

        It calls `evaluate(again)`, which goes forward and backward over the step's batches, as often as it likes.
        """

        def loss(again: bool) -> float:
            evaluate(again)
            return sum(map(float, self._losses)) * self.reduce(()).factor

        with without_reduction(self.optimizer):
            closure.search(self.optimizer, loss, self._world)

    def _checks(self) -> bool:
        """Return whether this step is refused if its gradient is not finite."""
        # A scaler skips non-finite steps by itself and lowers its scale, until the scale is 1.
        return bool(self._options.nan_policy) and (not self.scaler.is_enabled() or self.scaler.get_scale() <= 1.0)

    def _refuses(self, applied: Applied) -> bool:
        """Take the step with the gradients as they are; return True if all ranks refuse it: they are not finite."""
        optimizer, clip_norm, parameters = self.optimizer, self._options.clip_norm, self.parameters
        is_missing = all(p.grad is None for p in parameters)
        if self.name and not applied.counts_nothing:
            self._check_reached()
        if applied.counts_nothing or is_missing:
            return False  # momentum and weight decay must not move weights; a scaler does not step without gradients
        if self._checks() and not all_finite([p.grad for p in parameters]):
            return True
        if clip_norm is not None:
            self.scaler.unscale_(optimizer)
            clipping.clip_norm(parameters, clip_norm)
        with without_reduction(optimizer):
            self.was_taken = loss_scaling.step(self.scaler, optimizer)
        self.scaler.update()
        return False

    def _check_reached(self) -> None:
        """Raise ValueError if the loss has no gradient for a named optimizer: on all ranks, since it is reduced."""
        for name, optimizer in optimizers_by_name(self.optimizer, self.name).items():
            if all(p.grad is None for p in parameters_of(optimizer)):
                raise ValueError(
                    f"step yields a loss for {name!r} that reaches no parameter of this optimizer. "
                    "Received: no gradient on any rank. Yield it with the optimizer whose parameters it trains."
                )

    def _scale(self) -> float:
        return float(self.scaler.get_scale()) if self.scaler.is_enabled() else 1.0

    def _own_fault(self, batches: Sequence[Batch]) -> Fault | None:
        """Return what is not finite in this rank's gradient, before others add theirs."""
        if not self._checks() or all_finite([p.grad for p in self.parameters]):
            return None
        mean = float(torch.stack(self._losses).mean())
        return Fault("", self._first_non_finite(), mean, batches, steps_ago=1, is_late=True)

    def late_fault(self, fault: Fault) -> Fault:
        """Complete a fault of the step before, and drop its gradient."""
        return replace(fault, reduced=self.drop_gradients())

    def _first_non_finite(self) -> str:
        return self.name_of(first_non_finite((p, p.grad) for p in self.parameters)) or "none"

    def name_of(self, parameter: nn.Parameter | None) -> str | None:
        """Return a parameter's name."""
        return None if parameter is None else self._names[parameter]

    def drop_gradients(self) -> str:
        """Drop the gradients of a step that was refused; return the first parameter whose gradient is not finite."""
        name = self._first_non_finite()
        self.optimizer.zero_grad()
        return name

    def finish(self) -> Fault | None:
        """Apply what is still in flight after the last step; return why it was refused."""
        applied = self.exchange.flush(self._made(()))
        if applied is None:
            return None
        fault = self.late_fault(applied.fault) if self._refuses(applied) and applied.fault is not None else None
        self.optimizer.zero_grad()
        return fault

    @property
    def can_give_up(self) -> bool:
        """True if other ranks wait for this rank's gradients in the same step, and learn there that it gives up."""
        return self.exchange.can_give_up and not (self.is_reducing or self._everyone)

    def give_up(self) -> None:
        """Take part in the step's collectives without this rank's gradients; no rank takes the step."""
        self.weights.give_up()
        self.exchange.give_up()


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer, or all that are `Together`, reduce over ranks."""
    return hasattr(optimizer, "skip_synchronize")


def without_reduction(optimizer: Any) -> AbstractContextManager[Any]:
    """Within it, a step takes the gradients as they are; a distributed optimizer decides itself whether it is fused."""
    if is_distributed(optimizer):
        held: AbstractContextManager[Any] = optimizer.skip_synchronize()
        return held
    return fused_update.chosen(optimizer) if fused_update.applies_to(type(optimizer)) else nullcontext()
