"""One optimizer's part of a step: backward, reduction over ranks, loss scaling, clipping, the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hvdtrain.adapter import Fault, Options, Ranks
from hvdtrain.data.sources import Batch
from hvdtrain.distributed import launch_environment
from hvdtrain.distributed.world import World
from hvdtrain.torch.ops import divided, lazy, names
from hvdtrain.torch.ops.finite import all_finite, first_non_finite
from hvdtrain.torch.ops.functions import broadcast_optimizer_state
from hvdtrain.torch.ops.names import parameters_of
from hvdtrain.torch.reduction import fused_update
from hvdtrain.torch.reduction.exchange import Applied, Made
from hvdtrain.torch.reduction.loss_weights import LossWeights
from hvdtrain.torch.reduction.tensors import Whole
from hvdtrain.torch.steps import clipping, closure, divided_errors, loss_scaling
from hvdtrain.torch.steps.exchanges import Exchanges
from hvdtrain.torch.steps.together import optimizers_by_name

_PER_SAMPLE = "max.loss_per_sample"  # in rank_state


@dataclass
class Step:
    """The current step of an `Update`."""

    everyone: bool = False  # ranks wait for each other in forward and backward
    is_reducing: bool = False  # from where this rank's gradients are complete
    losses: list[torch.Tensor] = field(default_factory=list)  # with a closure, scaled as their gradients are
    was_taken: Callable[[], bool] | None = None  # returns True if the step was; None if no update was tried


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
        self.needs_closure = closure.needs_closure(optimizer)
        self.weights = LossWeights(loss, world)
        self.scaler = torch.amp.GradScaler(torch.device(world.device).type, enabled=options.precision == "fp16")
        self.step = Step()
        by_parameter = {parameter: each for each, parameter in names.parameters(model)}
        self.exchanges = Exchanges(optimizer, by_parameter, options, world)
        self._options, self._world = options, world
        if lazy.first(model) is None:
            self.exchanges.make()

    @property
    def optimizer(self) -> Any:
        """The optimizer; a distributed one if there are ranks to reduce over."""
        return self.exchanges.optimizer

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The optimizer's, in the order of its groups."""
        return parameters_of(self.optimizer)

    @property
    def rank_state(self) -> dict[str, NDArray[Any]]:
        """The largest weight of a sample, and what the exchange of all ranks keeps on this rank."""
        held = {_PER_SAMPLE: np.array([self.weights.per_sample])} | self.exchanges.every_step.rank_state
        return {f"{key}{self._suffix}": array for key, array in held.items()}

    @rank_state.setter
    def rank_state(self, held: dict[str, NDArray[Any]]) -> None:
        suffix = self._suffix
        own = {key.removesuffix(suffix): array for key, array in held.items() if key.endswith(suffix)}
        self.exchanges.every_step.rank_state = own
        if _PER_SAMPLE in own:
            self.weights.per_sample = float(own[_PER_SAMPLE][0])

    @property
    def _suffix(self) -> str:
        return f".{self.name}" if self.name else ""

    def start(self) -> None:
        """Broadcast the root's optimizer state and precision scaler."""
        self.exchanges.make()  # only now lazy modules have shapes
        # A scaler makes its scale when it is first used, which a rank without samples never does.
        self.scaler.scale(torch.zeros((), dtype=torch.float32, device=self._world.device))
        self.weights.per_sample = 0.0  # ranks begin together, and data may have changed
        if self._world.size > 1 or launch_environment.reduces_alone():
            if self._world.grid is None:  # else GridState gives it to ranks, each its part
                broadcast_optimizer_state(self.optimizer, root_rank=0)
            self.scaler.load_state_dict(self._world.broadcast_object(self.scaler.state_dict(), name="scaler"))
        self.exchanges.start()

    def reduce_over(self, ranks: Ranks) -> None:
        """Reduce gradients over these ranks, from the next step on; see `Adapter.reduce_over`."""
        self.weights.alone = ranks != "all"
        self.exchanges.use(ranks)

    def begin(self, batches: Sequence[Batch], *, everyone: bool, first: bool) -> LossWeights:
        """Begin a step; with `everyone`, a rank goes backward also over batches of which it has no samples."""
        self.step = Step(everyone, was_taken=self.step.was_taken)  # which an earlier loss of the batch may have set
        self.weights.begin(batches)
        # A rank without samples, or with none that count, adds no gradient: the optimizer reduces zeros for it.
        passes = len(batches) if everyone else sum(1 for each in self.weights.counted if each.weight)
        self.exchanges.used.scale_loss(self._scale)
        self.exchanges.used.begin(passes, first=first)
        self.optimizer.zero_grad()
        return self.weights

    def backward(self, loss: torch.Tensor, factor: float = 1.0) -> None:
        """Add the gradient of a loss times `factor`; one of several optimizers, to its own parameters only."""
        inputs = [p for p in self.parameters if p.requires_grad] if self.name else None
        self.scaled(loss, factor).backward(inputs=inputs)

    def scaled(self, loss: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """Return a loss times `factor`, and times the precision scaler's scale, whose gradient is to be added."""
        plain, loss = loss, loss if factor == 1.0 else loss * factor
        self.step.losses.append((loss if self.needs_closure else plain).detach())
        scaled: torch.Tensor = self.scaler.scale(loss)
        return scaled

    def apply(self, batches: Sequence[Batch]) -> Applied:
        """Reduce, unscale, clip and step. RankGaveUp where a rank has called `give_up`."""
        applied = self.reduce(batches)
        return replace(applied, is_refused=not self._step_or_refuse(applied))

    def reduce(self, batches: Sequence[Batch]) -> Applied:
        """Replace the gradients by their mean, before `unscale_` tests them: ranks must agree to skip a step."""
        self.step.is_reducing = True
        return self.exchanges.used.finish(self._made(batches))

    def _made(self, batches: Sequence[Batch]) -> Made:
        return Made(self.weights, self._scale, lambda: self._own_fault(batches))

    def begin_open(self, samples: int) -> float | None:
        """Begin a step of up to so many samples that may close early; see `LossWeights.begin_open`."""
        self.exchanges.detach()
        self.optimizer.zero_grad()
        self.step = Step()
        return self.weights.begin_open(samples)

    def step_with_mean(
        self, gradients: dict[nn.Parameter, torch.Tensor], weight: float, samples: int, *, is_cut: bool
    ) -> bool:
        """Step with the mean over ranks of such a step's gradients; return False if all ranks refuse it."""
        if weight or not is_cut:  # else what was cut off may count
            self.weights.learn(weight, samples)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        return self._step_or_refuse(Applied(not weight))

    def search(self, evaluate: Callable[[bool], None]) -> None:
        """Take the step of an optimizer that needs a closure.

        It calls `evaluate(again)`, which goes forward and backward over the step's batches, as often as it likes.
        """

        def loss(again: bool) -> float:
            evaluate(again)
            return sum(map(float, self.step.losses)) * self.reduce(()).factor

        with without_reduction(self.optimizer):
            closure.search(self.optimizer, loss, self._world)

    def _checks(self) -> bool:
        """Return whether this step is refused if its gradient is not finite."""
        # A scaler skips non-finite steps by itself and lowers its scale, until the scale is 1.
        return bool(self._options.nan_policy) and (not self.scaler.is_enabled() or self.scaler.get_scale() <= 1.0)

    def _step_or_refuse(self, applied: Applied) -> bool:
        """Step with the gradients as they are; return False if all ranks refuse to, because they are not finite."""
        with self.exchanges.used.tensors.stepping():
            return self._step(applied, self.exchanges.used.tensors)

    def _step(self, applied: Applied, tensors: Whole) -> bool:
        optimizer, clip_norm, parameters = self.optimizer, self._options.clip_norm, self.parameters
        is_missing = all(p.grad is None for p in parameters)
        if self.name and not applied.counts_nothing:
            self._check_reached()
        if applied.counts_nothing or (is_missing and not tensors.is_divided):
            return True  # momentum and weight decay must not move weights; a scaler does not step without gradients
        if self._checks() and not tensors.are_finite(all_finite([divided.local(p.grad) for p in parameters])):
            return False
        if clip_norm is not None or tensors.are_parts or tensors.is_divided:
            loss_scaling.unscale(self.scaler, optimizer, tensors)
        if clip_norm is not None:
            clipping.clip_norm(parameters, clip_norm, tensors)
        with without_reduction(optimizer), divided_errors.stepping(optimizer, self._world):
            self.step.was_taken = loss_scaling.step(self.scaler, optimizer)
        self.scaler.update()
        return True

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
        """Return the fault of this rank's gradient, before others add theirs; None if it is finite."""
        if not self._checks() or all_finite([p.grad for p in self.parameters]):
            return None
        mean = float(torch.stack(self.step.losses).mean())
        return Fault("", self.first_non_finite(), mean, batches, steps_ago=1, is_late=True)

    def late_fault(self, fault: Fault) -> Fault:
        """Complete a fault of the step before, and drop its gradient."""
        return replace(fault, reduced=self.drop_gradients())

    def first_non_finite(self) -> str:
        """Return the first parameter whose reduced gradient is not finite, or "none"; equal on all ranks."""
        parameters, tensors = self.parameters, self.exchanges.used.tensors
        with tensors.stepping():
            found = first_non_finite((i, divided.local(each.grad)) for i, each in enumerate(self.parameters))
            return tensors.first(found, lambda index: self.exchanges.names[parameters[index]]) or "none"

    def fault_of_losses(self) -> Fault:
        """Return the fault of a step that this rank cannot compute again, because a Grid divides the model.

        Gradients are reduced already. So only the losses tell if this rank's samples are the cause.
        """
        grid, losses = self._world.grid, [float(each) for each in self.step.losses]
        loss = float(np.mean(losses)) if losses else float("nan")
        is_only = grid.data_size == 1 or (self.weights.alone and grid.shards == 1)  # no other rank's samples count
        is_by_loss = bool(losses) and grid.tensor == 0 and (is_only or not np.isfinite(loss))
        return Fault(self.first_non_finite(), None, loss, is_by_loss=is_by_loss)

    def name_of(self, parameter: nn.Parameter | None) -> str | None:
        """Return a parameter's name."""
        return None if parameter is None else self.exchanges.names[parameter]

    def drop_gradients(self) -> str:
        """Drop the gradients of a step that was refused; return the first parameter whose gradient is not finite."""
        name = self.first_non_finite()
        self.optimizer.zero_grad()
        return name

    def finish(self) -> Fault | None:
        """Apply what is still in flight after the last step; return why it was refused."""
        applied = self.exchanges.used.flush(self._made(()))
        if applied is None:
            return None
        is_refused = not self._step_or_refuse(applied)
        fault = self.late_fault(applied.fault) if is_refused and applied.fault is not None else None
        self.optimizer.zero_grad()
        return fault

    @property
    def can_give_up(self) -> bool:
        """True if other ranks wait for this rank's gradients in the same step, and learn there that it gives up."""
        return self.exchanges.used.can_give_up and not (self.step.is_reducing or self.step.everyone)

    def give_up(self) -> None:
        """Take part in the step's collectives without this rank's gradients; no rank takes the step."""
        self.weights.give_up()
        self.exchanges.used.give_up()


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer, or all that are `Together`, reduce over ranks."""
    return hasattr(optimizer, "skip_synchronize")


def without_reduction(optimizer: Any) -> AbstractContextManager[Any]:
    """Within it, a step takes the gradients as they are; a distributed optimizer decides itself whether it is fused."""
    if is_distributed(optimizer):
        held: AbstractContextManager[Any] = optimizer.skip_synchronize()
        return held
    return fused_update.chosen(optimizer) if fused_update.applies_to(type(optimizer)) else nullcontext()
