"""DistributedOptimizer: a Keras 3 optimizer whose gradients are reduced over ranks.

Keras calls `_backend_apply_gradients` with a step's local gradients, accumulates them if it is configured to, and
calls `_clip_gradients` just before it changes weights. The gradients are reduced there: after accumulation, so that
nothing is sent between updates, and before clipping and weight decay, so that both see the numbers of one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras

from hvdtrain.errors import HvdTrainError
from hvdtrain.keras.backends import backend_module
from hvdtrain.keras.error_feedback import ErrorFeedback
from hvdtrain.keras.exchange import EVERY_STEP, Exchange
from hvdtrain.keras.memory import measure_script
from hvdtrain.keras.reduction import GradientReduction, identity
from hvdtrain.keras.shards import Shards
from hvdtrain.keras.variables import agree, path, without_counters

_backend = backend_module()

# Number of the next optimizer, in order of first steps. Ranks agree on the greatest, so that names are equal.
_next_number = 0


@dataclass
class _StepState:
    """State of a distributed optimizer besides Keras's. It is hidden, so that Keras neither tracks nor saves it."""

    number: int | None = None  # of this optimizer; None until ranks have agreed on it
    weight: Any = None  # a BatchWeight; None before `set_batch_weight`
    variables: list[Any] = field(default_factory=list)  # those of the current or last step; none before the first
    has_gradients: bool = False  # whether any have come; those of a step that loss scaling skips come no further
    reached: int = 0  # how far the current step has come: 1 at accumulation, 2 at clipping
    report: Callable[..., None] | None = None  # of skipped updates; None if gradients are not checked
    may_change: Any = None  # a boolean scalar: False if the step changes no weight; None if every step does
    exchange: Exchange = EVERY_STEP
    memory: ErrorFeedback | None = None  # None before it is needed
    shards: Shards | None = None  # likewise, and without shards
    are_parts: bool = False  # whether the step's reduced gradients are this rank's parts of them
    weight_names: dict[int, str] = field(
        default_factory=dict
    )  # in `memory`, by `identity`; empty outside of the Trainer


class DistributedMixin(keras.optimizers.Optimizer):
    """The base class that `DistributedOptimizer` puts before the user's optimizer class."""

    _hvd_how: GradientReduction  # of the class, so that from_config(get_config()) is distributed in the same way

    @property
    def _hvd_state(self) -> _StepState:
        # Not through Keras's and TensorFlow's __setattr__, which would track it.
        return self.__dict__.setdefault("_hvdtrain_state", _StepState())  # type: ignore[no-any-return]

    def _hvd_use(self, exchange: Exchange) -> bool:
        """Exchange gradients in this way from the next step on; return True if a step must be compiled again."""
        state = self._hvd_state
        if not exchange.reduces and state.number is None and self._hvd_how.active():
            self.agree_on_model()  # before a step, which loss scaling may end early on one rank alone
        changes, state.exchange = state.exchange is not exchange, exchange
        return changes and keras.backend.backend() != "torch"

    @_backend.untraced
    def build(self, variables: list[Any]) -> None:
        """Make the optimizer's variables. From here on, before the first step, the memory of steps is measured."""
        super().build(variables)
        measure_script(optimizer=self)

    @property
    def batch_weight(self) -> Any:
        """The `BatchWeight` that `set_batch_weight` sets; None before it is called."""
        return self._hvd_state.weight

    def set_batch_weight(self, value: float) -> None:
        """From the next step on, multiply local gradients by `value`, before accumulation and reduction.

        With value = local samples * size / samples of all ranks, every sample has the same weight. At 0.0 this rank
        sends exact zeros, even if its gradients are NaN. Call it once before the first step: a compiled step
        reads the weight each time it runs, but only if it was compiled with one.
        """
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"A batch weight must be finite and >= 0. Received: {value}")
        state = self._hvd_state
        if state.weight is None:
            if state.variables and keras.backend.backend() != "torch":
                raise RuntimeError(
                    "Steps are compiled without a weight: call set_batch_weight(1.0) before the first step"
                )
            state.weight = _backend.BatchWeight()
        state.weight.set(float(value))

    @property
    def reports_updates(self) -> bool:
        """True if gradients are checked, and skipped updates are reported; see `skip_non_finite`."""
        return self._hvd_state.report is not None

    @property
    def has_stepped(self) -> bool:
        """True if gradients of a step, or of a traced step, have come here; the step may have been skipped."""
        return self._hvd_state.has_gradients

    @_backend.untraced
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Reduce `grads` over ranks and update `trainable_variables`; see keras.optimizers.Optimizer.apply."""
        state = self._hvd_state
        state.reached = 0
        grads = list(grads)
        result = super().apply(grads, trainable_variables)
        if grads and state.reached < (1 if self.gradient_accumulation_steps else 2):
            raise HvdTrainError(
                f"{type(self).__name__}.apply updated weights without Keras's _backend_apply_gradients or "
                "_clip_gradients, so its gradients were not reduced over ranks. Let it call super().apply()."
            )
        return result

    @_backend.untraced
    def _backend_apply_gradients(self, grads: list[Any], trainable_variables: list[Any]) -> Any:
        state = self._hvd_state
        if state.number is None and self._hvd_how.active() and state.exchange.reduces:
            self.agree_on_model()
        state.reached, state.has_gradients = 1, True
        state.variables = list(trainable_variables)
        if state.weight is not None:
            grads = state.weight.multiply(grads)
        return super()._backend_apply_gradients(grads, trainable_variables)

    @_backend.untraced
    def _clip_gradients(self, grads: list[Any]) -> Any:
        state = self._hvd_state
        state.reached, state.are_parts = 2, False
        own = None if state.report is None else _backend.non_finite_flags(grads)
        grads, state.may_change = state.exchange.finish(self, grads)
        if state.report is not None:
            # Reduced gradients are equal on all ranks, so all ranks decide the same, unless they step alone.
            state.may_change = _backend.may_update(self, grads)
            report = functools.partial(_refuse, state.memory, state.report, [path(v) for v in state.variables])
            # Flags are only made for a report: `may_update` has looked at each gradient once.
            _backend.report_unless(state.may_change, report, own, lambda: _backend.non_finite_flags(grads)())
        return super()._clip_gradients(grads)

    @_backend.untraced
    def _apply_weight_decay(self, variables: list[Any]) -> None:
        if self._hvd_state.may_change is None:
            super()._apply_weight_decay(variables)
        # Else `_backend_update_step`, which Keras calls next, applies it, but only in a step that is not skipped.

    @_backend.untraced
    def _backend_update_step(self, grads: list[Any], trainable_variables: list[Any], learning_rate: Any) -> None:
        parent: Any = super()
        shards = self._hvd_shards

        def step() -> None:
            if shards is None:
                parent._backend_update_step(grads, trainable_variables, learning_rate)
                return
            parts = grads if self._hvd_state.are_parts else shards.parts(grads, trainable_variables)
            shards.step(self, lambda g, v: parent._backend_update_step(g, v, learning_rate), parts, trainable_variables)

        def update() -> None:
            parent._apply_weight_decay(trainable_variables)
            step()

        if self._hvd_state.may_change is None:
            step()
            return
        _backend.run_if(self._hvd_state.may_change, update, self._skip)

    @_backend.untraced
    def _skip(self) -> None:
        """Undo the step's count of passes and its accumulated gradients; afterwards `apply` counts the last pass."""
        self._iterations.assign_sub(self._passes)
        for accumulator in self._hvd_accumulators:  # on torch, Keras clears them by a product with 0, which leaves NaN
            accumulator.assign(keras.ops.zeros_like(accumulator))

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Return updated variables, as JAX needs; see keras.optimizers.Optimizer.stateless_apply."""
        new_weights, new_state = super().stateless_apply(optimizer_variables, grads, trainable_variables)
        if self._hvd_state.may_change is None or keras.backend.backend() != "jax":
            return new_weights, new_state
        # Under loss scaling, the old values arrive as Keras variables.
        weights = [keras.ops.convert_to_tensor(v) for v in trainable_variables]
        state = [keras.ops.convert_to_tensor(v) for v in optimizer_variables]
        cleared = {id(v) for v in self._hvd_accumulators}
        for index, variable in enumerate(self.variables):
            if variable is self._iterations:
                state[index] = new_state[index] - self._passes
            elif id(variable) in cleared:
                state[index] = new_state[index]
        where = functools.partial(keras.ops.where, self._hvd_state.may_change)
        return list(map(where, new_weights, weights)), list(map(where, new_state, state))

    @property
    def _hvd_shards(self) -> Shards | None:
        """The shards of the slot variables; None if each rank holds all of them."""
        state, how = self._hvd_state, self._hvd_how
        if state.shards is None and how.shard_state and (how.size() > 1 or how.active()):
            state.shards = Shards(how, self._iterations)
        return state.shards

    def add_variable_from_reference(
        self, reference_variable: Any, name: str | None = None, initializer: Any = "zeros"
    ) -> Any:
        """Add a slot variable; in shards, of this rank's part of the weight. See keras.optimizers.Optimizer."""
        shards = self._hvd_shards
        if shards is None or name == "gradient_accumulator":  # gradients add up before they are reduced
            return super().add_variable_from_reference(reference_variable, name, initializer)
        from keras.src import backend

        of_weight = path(reference_variable).replace("/", "_").replace(":", "_")
        with backend.name_scope(self.name, caller=self):
            slot = shards.slot(reference_variable, f"{of_weight}_{name or 'var'}", initializer)
        self._track_variable(slot)
        return slot

    def _var_key(self, variable: Any) -> Any:
        """Return the key of a variable. That of a part is the whole weight's."""
        return super()._var_key(getattr(variable, "_hvd_whole", variable))

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gather a sharded state on one rank, or on all (None): there Keras saves it until the next step.

        A collective, as in torch's ZeroRedundancyOptimizer. Without shards it does nothing.
        """
        if self._hvd_shards is not None:
            self._hvd_shards.gather(to)

    @property
    def _passes(self) -> int:
        return int(self.gradient_accumulation_steps or 1)

    @property
    def _hvd_accumulators(self) -> list[Any]:
        return [v for v in getattr(self, "_accumulated_gradients", None) or () if v is not None]

    @_backend.untraced
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update `variable`, in one pass where the backend has one; see keras.optimizers.Optimizer.update_step."""
        step = super().update_step
        # One process uses Keras's arithmetic, to equal plain Keras bit for bit.
        if not (self._hvd_how.active() and _backend.fused_update(self, step, gradient, variable, learning_rate)):
            step(gradient, variable, learning_rate)

    def __deepcopy__(self, memo: Any = None) -> Any:
        # Keras copies an optimizer through its file format, which has its settings but not the reduction.
        return type(self).from_config(self.get_config())

    __copy__ = __deepcopy__

    def skip_non_finite(self, report: Callable[..., None]) -> None:
        """From the first step on, skip updates whose reduced gradients are not finite, on all ranks the same.

        A skipped update does not count in `iterations` and leaves no accumulated gradient.
        `report` is called on the host for each, with the variables' paths and, for each variable, whether its gradient
        on this rank is not finite, and whether the reduced one is not. The last is left out if loss scaling skips.
        """
        self._hvd_state.report = report

    def finite_everywhere(self, finite: Any, grads: Sequence[Any]) -> Any:
        """Return whether gradients are finite on all ranks, for loss scaling; report if not. At weight 0 they are."""
        state, how = self._hvd_state, self._hvd_how
        state.has_gradients = True
        if state.weight is not None:
            finite = keras.ops.logical_or(finite, state.weight.read() == 0.0)
        if how.active() and state.exchange.reduces:
            if state.number is None:
                self.agree_on_model()
            finite = _backend.true_on_all_ranks(finite, f"{self._prefix}.finite", how)
        if state.report is not None:
            given = [(g, path(v)) for g, v in zip(grads, self._trainable_variables, strict=True) if g is not None]
            report = functools.partial(state.report, [name for _, name in given])
            _backend.report_unless(finite, report, _backend.non_finite_flags([g for g, _ in given]))
        return finite

    def agree_on_model(self) -> None:
        """Let ranks agree on variables and names, at the first step and after ranks have changed; see `agree`."""
        global _next_number
        state = self._hvd_state
        if state.memory is not None and state.number is not None:  # ranks have changed, and begin together
            state.memory.reset()
        mine = _next_number if state.number is None else state.number
        what = f"models under {type(self).__name__}"
        state.number = agree(self._trainable_variables, what=what, offer=mine, process_set=self._hvd_how.process_set)
        _next_number = max(_next_number, state.number + 1)

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of `var`; scale it by 1 / size unless scale_local_gradients is False."""
        if self._hvd_how.shard_state:
            raise ValueError(
                "With a sharded state, each rank updates a part of each weight, so no rank can train a weight alone. "
                f"Received: the local variable {path(var)} with shard_state=True. Use no shards."
            )
        self._hvd_how.local_variables.append(var)

    @property
    def _prefix(self) -> str:
        return f"{self._hvd_how.name or f'Distributed{type(self).__name__}'}.{self._hvd_state.number}"

    def _hvd_names(self, variables: Sequence[Any]) -> list[str]:
        """Return the names of the reductions of these variables' gradients, equal on all ranks."""
        index = self._get_variable_index
        return [f"{self._prefix}.{index(v)}.{without_counters(path(v))}" for v in variables]

    @property
    def _hvd_memory(self) -> ErrorFeedback | None:
        """What has not been sent of this rank's gradients; None if compression leaves nothing out."""
        state, scheme = self._hvd_state, self._hvd_how.compression.scheme
        if state.memory is None and scheme is not None:
            state.memory = ErrorFeedback(scheme)
        return state.memory

    def _hvd_name_weights(self, names: Mapping[int, str]) -> None:
        """Let the memory know weights by these names, by `identity`; by default, names have the optimizer's numbers."""
        self._hvd_state.weight_names = dict(names)
        if self._hvd_memory is not None:
            self._hvd_memory.know(names.values())

    def _hvd_how_of(self, variables: Sequence[Any]) -> GradientReduction:
        """Return the reduction of these variables' gradients, with the memory of them."""
        if self._hvd_memory is None:
            return self._hvd_how
        given, index = self._hvd_state.weight_names, self._get_variable_index
        names = [given.get(identity(v)) or f"{index(v)}.{without_counters(path(v))}" for v in variables]
        return replace(self._hvd_how, compression=self._hvd_memory.of(names))

    def _hvd_reduce(self, grads: list[Any]) -> list[Any]:
        """Return the gradients of the step's variables, reduced over ranks but for those of local variables."""
        how, variables = self._hvd_how, self._hvd_state.variables
        local = {identity(v) for v in how.local_variables}
        factor = how.factor / (how.size() if local and how.scale_local_gradients else 1)
        reduced = list(grads) if factor == 1.0 else [g * factor for g in grads]
        shared = [i for i, v in enumerate(variables) if identity(v) not in local]
        if shared:
            chosen = [variables[i] for i in shared]
            names, how = self._hvd_names(chosen), self._hvd_how_of(chosen)
            results = _backend.reduce_gradients([grads[i] for i in shared], names, chosen, how)
            for i, result in zip(shared, results, strict=True):
                reduced[i] = result
        return reduced


def _refuse(memory: ErrorFeedback | None, report: Callable[..., None], *facts: Any) -> None:
    """Report a skipped update, of which nothing is remembered."""
    if memory is not None:
        memory.refuse()
    report(*facts)


def distributed_part(optimizer: Any) -> Any | None:
    """Return the optimizer that reduces gradients: `optimizer`, or the one in a LossScaleOptimizer; None if neither."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner if isinstance(inner, DistributedMixin) else None
