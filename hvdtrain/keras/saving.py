"""Make the optimizer of a compiled or saved model distributed."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.keras.compression import Compression
from hvdtrain.keras.optimizer import distributed_part
from hvdtrain.keras.wrapping import DistributedOptimizer, without_xla


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
    objects = {**{cls.__name__: cls for cls in custom_optimizers or []}, **(custom_objects or {})}
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        _mend_optimizer(model, filepath)
        distribute_model(model, compression=compression)
    return model


def distribute_model(model: Any, **options: Any) -> None:
    """Make the optimizer of a compiled model distributed, keeping its state.

    Args:
        model: compiled keras.Model.
        options: see `DistributedOptimizer`.
    """
    adopt_optimizer(model, DistributedOptimizer(model.optimizer, **options))


def adopt_optimizer(model: Any, distributed: Any) -> None:
    """Give a compiled model a distributed optimizer, for training and for saving."""
    model.optimizer = distributed
    compiled = model._compile_config.config  # what the next save writes
    wrapped = isinstance(compiled.get("optimizer"), keras.optimizers.LossScaleOptimizer)
    compiled["optimizer"] = model.optimizer if wrapped else distributed_part(model.optimizer)
    model.train_function = None  # it may hold the plain optimizer
    without_xla(model)


def _mend_optimizer(model: Any, filepath: Any) -> None:
    """Give a model from an HDF5 file an optimizer that can continue: Keras 3.15 builds it over no variables at all."""
    optimizer = model.optimizer
    if not optimizer.built or optimizer._trainable_variables or not model.trainable_variables:
        return
    import h5py
    from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group

    model.optimizer = type(optimizer).from_config(optimizer.get_config())
    model.optimizer.build(model.trainable_variables)
    with h5py.File(filepath) as file:
        values = load_optimizer_weights_from_hdf5_group(file)
        if len(values) != len(model.optimizer.variables):
            raise ValueError(
                f"{filepath} holds {len(values)} values of its optimizer's state, but {type(optimizer).__name__} has "
                f"{len(model.optimizer.variables)}. Save the model as .keras instead."
            )
        model.optimizer.set_weights(values)
