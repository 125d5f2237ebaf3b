"""The sizes of a Keras model's weights, gradients and optimizer state."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.keras.backends import backend_module
from hvdtrain.keras.error_feedback import ErrorFeedback
from hvdtrain.keras.model_optimizers import all_optimizers
from hvdtrain.keras.optimizer import distributed_part
from hvdtrain.keras.variables import num_bytes
from hvdtrain.telemetry.memory import Held, Parts


def held_by(model: keras.Model, changes: ErrorFeedback | None = None) -> Held:
    """Return what a rank holds; a step's gradients count, and what compression of `changes` of weights remembers."""
    optimizers: list[Any] = [each for each in all_optimizers(model) if each is not None]
    state = {id(variable): variable for each in optimizers for variable in each.variables}
    gradients = sum(map(num_bytes, model.trainable_variables))
    weights, optimizer = (sum(map(num_bytes, each)) for each in (model.weights, state.values()))
    memories = [getattr(distributed_part(each), "_hvd_memory", None) for each in optimizers] + [changes]
    buckets = sum(memory.nbytes for memory in memories if memory is not None)
    parts = Parts(weights=weights, gradients=gradients, optimizer=optimizer, buckets=buckets)
    return Held(parts=parts, missing=gradients, device=backend_module().memory_in_use())
