"""What each rank of a Keras run holds of its own: seeds, running metrics, statistics that are not settled yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]


def capture(model: keras.Model, *, metrics: bool) -> Arrays:
    """Return them under the names that `hvdtrain.distributed.rank_state` explains.

    Args:
        model: a compiled model.
        metrics: whether those of an epoch under way are among them.
    """
    held = {f"random.seed.{index}": _to_host(v) for index, v in enumerate(_seeds(model))}
    held |= {_weight_name(index, v): _to_host(v) for index, v in enumerate(model.non_trainable_weights)}
    if metrics:
        held |= {_metric_name(index, v): _to_host(v) for index, v in enumerate(_metrics(model))}
    if keras.backend.backend() == "torch":  # whose Dropout draws from torch itself, unless it was given a seed
        from hvdtrain.torch import training_state

        held |= training_state.random_states()
    return held


def restore(held: Arrays, model: keras.Model) -> None:
    """Take on what `capture` returned, but for metrics, as far as it is there."""
    _assign([f"random.seed.{index}" for index in range(len(_seeds(model)))], _seeds(model), held)
    weights = model.non_trainable_weights
    _assign([_weight_name(index, v) for index, v in enumerate(weights)], weights, held)
    if keras.backend.backend() == "torch":
        from hvdtrain.torch import training_state

        training_state.set_random_states(held)


def restore_metrics(held: Arrays, model: keras.Model) -> None:
    """Take on the metrics of an epoch under way; they exist once the model has seen a batch."""
    variables = _metrics(model)
    _assign([_metric_name(index, v) for index, v in enumerate(variables)], variables, held)


def has_metrics(held: Arrays) -> bool:
    """Return whether an epoch was under way."""
    return any(name.split(".")[1] == "metric" for name in held)


def _seeds(model: keras.Model) -> list[Any]:
    from keras.src.backend.common import global_state

    shared = global_state.get_global_attribute("global_seed_generator")
    generators = [g for layer in model._flatten_layers() for g in getattr(layer, "_seed_generators", ())]
    states = {id(g.state): g.state for g in [*generators, *([shared] if shared is not None else [])]}
    return list(states.values())


def _metrics(model: keras.Model) -> list[Any]:
    return [v for metric in model.metrics for v in metric.variables]


def _metric_name(index: int, variable: Any) -> str:
    return f"{'sum' if variable.aggregation == 'sum' else 'mean'}.metric.{index}"


def _weight_name(index: int, variable: Any) -> str:
    return f"{'mean' if 'float' in str(variable.dtype) else 'max'}.weight.{index}"


def _assign(names: Sequence[str], variables: Sequence[Any], held: Arrays) -> None:
    for name, variable in zip(names, variables, strict=True):
        if name in held:
            variable.assign(held[name])


def _to_host(variable: Any) -> NDArray[Any]:
    value = np.array(keras.ops.convert_to_numpy(variable))
    return value if value.dtype.kind in "biuf" and value.dtype.itemsize <= 8 else value.astype(np.float32)  # bfloat16
