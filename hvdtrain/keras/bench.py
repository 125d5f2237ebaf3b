"""The measurements of `hvdtrain bench` with Keras: an allreduce on its backend, and a standard model's steps."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.keras.backends import backend_module
from hvdtrain.keras.reduction import GradientReduction


def allreduce_of(num_bytes: int, *, device: str) -> Callable[[], None]:
    """Return a function that reduces a float32 tensor of `num_bytes` as an optimizer's step does, and waits for it."""
    backend, how, name = backend_module(), GradientReduction(), f"bench.{num_bytes}"
    tensor = keras.ops.ones((num_bytes // 4,), "float32")
    variable = keras.Variable(tensor)

    def once(gradient: Any) -> Any:
        return backend.reduce_gradients([gradient], [name], [variable], how)[0]

    compiled: Any = once
    if keras.backend.backend() != "torch":  # as the backend runs a step: traced
        library = importlib.import_module(keras.backend.backend())
        compiled = library.jit(once) if keras.backend.backend() == "jax" else library.function(once)

    def reduce() -> None:
        result = compiled(tensor)
        if hasattr(result, "block_until_ready"):
            result.block_until_ready()

    return reduce


def mlp(inputs: int, hidden: int, classes: int) -> dict[str, Any]:
    """Return the standard model, with optimizer and loss as `Trainer` takes them."""
    dense = [keras.layers.Dense(hidden, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((inputs,)), *dense, keras.layers.Dense(classes)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"model": model, "optimizer": keras.optimizers.SGD(0.01, momentum=0.9), "loss": loss}
