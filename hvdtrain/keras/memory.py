"""The sizes of a Keras model's weights, gradients and optimizer state; in a script without a Trainer too."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from hvdtrain.keras import basics
from hvdtrain.keras.backends import backend_module
from hvdtrain.keras.error_feedback import ErrorFeedback
from hvdtrain.keras.model_optimizers import all_optimizers
from hvdtrain.keras.variables import num_bytes
from hvdtrain.telemetry import rank_memory
from hvdtrain.telemetry.memory import Held, Parts, Use
from hvdtrain.telemetry.rank_memory import Place

# Of a script: models with a distributed optimizer, and such optimizers. A Trainer's are not asked.
_models: weakref.WeakSet[Any] = weakref.WeakSet()
_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


def held_by(model: keras.Model, changes: ErrorFeedback | None = None) -> Held:
    """Return what a rank holds; a step's gradients count, and what compression of `changes` of weights remembers."""
    optimizers = [each for each in all_optimizers(model) if each is not None]
    return _held(model.weights, model.trainable_variables, optimizers, changes)


def measure_script(*, model: Any = None, optimizer: Any = None) -> None:
    """Let an out-of-memory error of a script that has made its optimizer distributed say what takes the memory."""
    for each, known in ((model, _models), (optimizer, _optimizers)):
        if each is not None:
            known.add(each)
    rank_memory.measure_script(_held_by_script, _use_of_script, lambda: Place(basics.rank(), basics.local_size()))


def _held_by_script() -> Held:
    models, optimizers = [*_models], [*_optimizers]
    trained = [v for each in models for v in each.trainable_variables]
    trained += [v for each in optimizers for v in each._trainable_variables]  # of a custom loop
    return _held([*trained, *(v for model in models for v in model.weights)], trained, optimizers)


def _use_of_script() -> Use:
    reductions = [each._hvd_how for each in _optimizers]
    options = {"compression": next((how.compression.name for how in reductions if how.compression.scheme), "none")}
    options |= {"shard": "optimizer"} if any(how.shard_state for how in reductions) else {}
    return Use("keras", basics.size(), options, in_script=True)


def _held(
    weights: Iterable[Any], trained: Iterable[Any], optimizers: Sequence[Any], changes: ErrorFeedback | None = None
) -> Held:
    gradients = _sum_once(trained)
    memories = [getattr(getattr(each, "inner_optimizer", each), "_hvd_memory", None) for each in optimizers] + [changes]
    parts = Parts(
        weights=_sum_once(weights),
        gradients=gradients,
        optimizer=_sum_once(variable for each in optimizers for variable in each.variables),
        buckets=sum(memory.nbytes for memory in memories if memory is not None),
    )
    return Held(parts=parts, missing=gradients, device=backend_module().memory_in_use())


def _sum_once(variables: Iterable[Any]) -> int:
    return sum(map(num_bytes, {id(each): each for each in variables}.values()))
