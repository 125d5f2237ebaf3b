"""The exchange of `sync=Delayed()`: a step applies the mean gradient of the step before, and keeps its own.

Each of Keras's backends has a module here with the class `InFlight`, which holds the gradient of one step:

    swap(gradients, names, variables, how)   within a step, perhaps in a graph: keeps the step's gradients; returns the
                                             mean of those of the step before, and False if there were none
    launch()                                 after a step: starts the reduction, if it is not a part of the next step
    mean()                                   pairs of a variable and its mean gradient, which is kept; None without
                                             one. Waits for the reduction. A collective
    put(pairs)                               keeps these means instead; None: none. Not a collective
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from hvdtrain.adapter import Options, Refusal
from hvdtrain.distributed.world import World
from hvdtrain.keras import ops, training_state
from hvdtrain.keras.backends import backend_module
from hvdtrain.keras.exchange import REDUCED, Exchange
from hvdtrain.keras.model_optimizers import other_optimizers

_backend = backend_module()
_PREFIX, _META = "sync.gradient.", "delayed"  # in `State.arrays` and `State.meta`


def refusals(model: keras.Model, optimizer: Any, options: Options) -> Iterator[Refusal]:
    """Yield what cannot be delayed of this model, its plain optimizer and the options."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    layers = model._flatten_layers(include_self=True)
    is_half = options.precision == "fp16" or any(each.dtype_policy.name.endswith("mixed_float16") for each in layers)
    norms = [each.name for each in layers if type(each).__module__.startswith("hvdtrain.")]
    others = ", ".join(other_optimizers(model))
    found = {
        "loss scaling": (is_half or inner is not optimizer)
        and "in each step all ranks agree if its gradients are finite, and would wait for the gradient in flight; use "
        'precision="bf16"',
        f"nan_policy={options.nan_policy!r}": options.nan_policy is not None
        and "ranks would learn of a gradient that is not finite after its step, which Keras cannot undo then; leave it "
        "out",
        f"{type(inner).__name__}(use_ema=True)": inner.use_ema
        and "it would average the weights of the first step, which changes nothing; leave it out",
        f"the optimizers optimizer and {others}": bool(others) and "each would be a step late; use one optimizer",
        f"the layer {', '.join(norms)}": bool(norms)
        and "it exchanges statistics in every step; use keras.layers.BatchNormalization",
    }
    for received, reason in found.items():
        if reason:
            yield Refusal(("delay",), received, reason)


class Delayed(Exchange):
    """Applies the mean gradient of the step before, and keeps the gradients of this step.

    Args:
        model: built, and compiled with an optimizer that reduces.
        between_exchanges: called after each step, when no gradient is in flight.
    """

    reduces = True

    def __init__(self, model: keras.Model, world: World, between_exchanges: Callable[[], None]) -> None:
        self._model, self._world, self._between_exchanges = model, world, between_exchanges
        module = importlib.import_module(f"hvdtrain.keras.delayed.{keras.backend.backend()}")
        self._in_flight = module.InFlight()

    def finish(self, part: Any, gradients: list[Any]) -> tuple[list[Any], Any]:
        """Return the mean of the step before, and whether there is one."""
        variables = part._hvd_state.variables
        how = part._hvd_how_of(variables)
        names = part._hvd_names(variables) if how.active() else []

        def swap(gradients: list[Any]) -> Any:
            return self._in_flight.swap(gradients, names, variables, how)

        return _backend.on_update_step(part, swap, _unchanged, gradients)  # type: ignore[no-any-return]

    def end_step(self) -> None:
        """Start to reduce the step's gradients; before that, other collectives need not wait for them."""
        self._between_exchanges()
        self._in_flight.launch()

    def start(self) -> None:
        """Give all ranks the root's gradient, if it has one from a checkpoint; a collective."""
        mine = self._named(self._in_flight.restored())
        found = self._world.broadcast_object(None if mine is None else list(mine), name="delayed")
        if found is None:
            self._in_flight.put(None)
            return
        variables = training_state.weights_by_name(self._model)
        pairs = []
        for name in found:
            value = (mine or {}).get(name)
            if value is None:
                value = np.zeros(variables[name].shape, keras.backend.standardize_dtype(variables[name].dtype))
            pairs.append((variables[name], ops.broadcast(value, 0, name=f"{_PREFIX}{name}")))
        self._in_flight.put(pairs)

    def flush(self) -> None:
        """Apply the gradient of the last step, which no later step will apply."""
        found = self._in_flight.mean()
        self._in_flight.put(None)
        trained = {id(v) for v in self._model.trainable_variables}
        pairs = [(keras.ops.convert_to_tensor(g), v) for v, g in found or () if id(v) in trained]
        if not pairs:
            return
        part: Any = self._model.optimizer
        passes, part.gradient_accumulation_steps = part.gradient_accumulation_steps, None
        part._hvd_use(REDUCED)
        try:
            part.apply_gradients(pairs)
        finally:
            part.gradient_accumulation_steps = passes
            part._hvd_use(self)
        part._iterations.assign_add((passes or 1) - 1)  # `apply` has counted one pass

    def wait(self) -> None:
        """Wait for the gradient in flight, whose reduction changes what compression remembers; a collective."""
        self._in_flight.mean()

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the parts of `State.arrays` and `State.meta` that are of the gradient in flight; a collective."""
        found = self._named(self._in_flight.mean())
        return ({}, {}) if found is None else ({_PREFIX + name: mean for name, mean in found.items()}, {_META: {}})

    def load(self, arrays: Mapping[str, Any], meta: dict[str, Any]) -> None:
        """Restore it. A checkpoint of a run without a delay has none."""
        variables = training_state.weights_by_name(self._model)
        pairs = [(v, arrays[_PREFIX + name]) for name, v in variables.items() if _PREFIX + name in arrays]
        self._in_flight.put(pairs if pairs and _META in meta else None)

    def _named(self, pairs: Any) -> dict[str, Any] | None:
        """Return gradients by the names of their weights."""
        if pairs is None:
            return None
        means = {id(v): mean for v, mean in pairs}
        variables = training_state.weights_by_name(self._model)
        return {name: means[id(v)] for name, v in variables.items() if id(v) in means}


def _unchanged(gradients: list[Any]) -> tuple[list[Any], Any]:
    return list(gradients), keras.ops.convert_to_tensor(True)
