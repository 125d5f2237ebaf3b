"""Weights and optimizer state as plain arrays, and back."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np

from hvdtrain.adapter import State
from hvdtrain.keras.agreement import path

# Optimizer variables carry their model variable's path with "_" for "/": "sgd/sequential_1_dense_2_kernel_momentum".
_COUNTER = re.compile(r"_\d+(?=[_/.]|$)")


def capture(model: keras.Model) -> State:
    """Return the model's weights and its optimizer's variables, as arrays that the next step may change."""
    variables = _variables(model)
    # Those that were made not to be trained, as running statistics are. A frozen layer's weights are no such: nothing
    # changes them, and a fault in them must be found before `settle` averages it.
    frozen = {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}
    own = {id(v) for v in model.non_trainable_weights} - frozen
    trained = {id(v) for v in model.trainable_weights}
    return State(
        {name: np.asarray(keras.ops.convert_to_numpy(v)) for name, v in variables.items()},
        {},
        unsettled=frozenset(name for name, v in variables.items() if id(v) in own),
        trained=frozenset(name for name, v in variables.items() if id(v) in trained),
    )


def restore(state: State, model: keras.Model) -> None:
    """Take on what `capture` returned.

    Raises:
        ValueError: the model is not built, or a tensor is missing, left over or of another shape; nothing has changed.
    """
    if not model.built:
        raise ValueError(f"{model.name} is not built: call it on a batch, or give it an Input, before loading weights")
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    current = _variables(model)
    for name in [*current, *state.arrays]:
        here = tuple(current[name].shape) if name in current else "missing"
        there = state.arrays[name].shape if name in state.arrays else "missing"
        if here != there:
            raise ValueError(f"tensor {name} is {there} in the checkpoint and {here} in the model")
    for name, variable in current.items():
        variable.assign(state.arrays[name])


def _variables(model: keras.Model) -> dict[str, Any]:
    """Return every variable under a name that does not depend on how many layers this process has made before.

    Sorted names are in the order of `model.weights`, so that plain Keras loads them by `model.set_weights`.

    Gradient accumulators are left out: they hold this rank's gradients, and between steps nothing but zeros.
    """
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    local = {id(v) for v in getattr(inner, "_accumulated_gradients", None) or ()}
    groups = {"model": model.weights, "optimizer": model.optimizer.variables}
    return {
        f"{group}.{index:05d}.{_COUNTER.sub('', path(variable))}": variable
        for group, variables in groups.items()
        for index, variable in enumerate(v for v in variables if id(v) not in local)
    }
