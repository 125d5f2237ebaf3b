"""Find the methods of Keras that a model's class overrides."""

from __future__ import annotations

import keras

STEPS = ("train_step", "test_step", "compute_metrics", "get_metrics_result")


def overrides(model: keras.Model, *names: str) -> bool:
    """Return whether the model's class has a method of its own under one of these names of keras.Model."""
    return any(getattr(type(model), name) is not getattr(keras.Model, name) for name in names)
