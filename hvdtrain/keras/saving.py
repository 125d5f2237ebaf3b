"""Load a saved Keras model to train it further on several ranks."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.keras.compression import Compression
from hvdtrain.keras.optimizer import distributed_part
from hvdtrain.keras.seams import without_xla
from hvdtrain.keras.wrapping import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: list[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Return a saved model whose optimizer, with its state, is distributed.

    Args:
        filepath: a .keras or .h5 file, as keras.models.load_model takes it.
        custom_optimizers: optimizer classes of your own that the file names.
        custom_objects: further objects that the file names.
        compression: what travels: Compression.none, .fp16 or .bf16.
        legacy_opts: Keras 3 has no legacy optimizers: must be False.

    Raises:
        ValueError: `legacy_opts` is True.
    """
    if legacy_opts:
        raise ValueError("Keras 3 has no legacy optimizers. Received: legacy_opts=True")
    objects = {cls.__name__: cls for cls in custom_optimizers or []}
    objects.update(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        distribute_model(model, compression=compression)
    return model


def distribute_model(model: Any, **options: Any) -> None:
    """Make the optimizer of a compiled model distributed, keeping its state.

    Args:
        model: compiled keras.Model.
        options: see `DistributedOptimizer`.
    """
    model.optimizer = DistributedOptimizer(model.optimizer, **options)
    compiled = model._compile_config.config  # what the next save writes down
    wrapped = isinstance(compiled.get("optimizer"), keras.optimizers.LossScaleOptimizer)
    compiled["optimizer"] = model.optimizer if wrapped else distributed_part(model.optimizer)
    model.train_function = None  # it may hold the plain optimizer
    without_xla(model)
