"""The Keras models, and what every Keras peer shares; runs on the backend that KERAS_BACKEND names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from benchmarks import workloads
from benchmarks.turns import Turns
from hvdtrain.data import sharding

CHECK_SAMPLES = 64


def limit_threads() -> None:
    """Compute with one thread, where the peer's environment says so. Before TensorFlow computes anything."""
    if os.environ.get("KERAS_BACKEND") == "tensorflow" and os.environ.get("TF_NUM_INTRAOP_THREADS") == "1":
        import tensorflow

        tensorflow.config.threading.set_intra_op_parallelism_threads(1)
        tensorflow.config.threading.set_inter_op_parallelism_threads(1)


class Task:
    """A workload in Keras: the same model, optimizer and data for every peer."""

    def __init__(self) -> None:
        import keras

        self.workload = workloads.of_this_process()
        keras.utils.set_random_seed(workloads.SEED)
        self.model = keras.Sequential(_layers(self.workload.model))
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.inputs, self.targets = workloads.make_data(self.workload)

    def optimizer(self) -> Any:
        """Return plain SGD."""
        import keras

        return keras.optimizers.SGD(workloads.LEARNING_RATE, momentum=workloads.MOMENTUM)

    def fit(self, *, rank: int, size: int, callbacks: list[Any], batch_size: int | None = None) -> None:
        """Train the compiled model with Keras's own fit on this rank's share, until there are no more turns."""
        indices = np.asarray(
            sharding.shard_indices(len(self.inputs), rank=rank, size=size, epoch=0, seed=workloads.SEED)
        )
        self.model.fit(
            self.inputs[indices],
            self.targets[indices],
            batch_size=batch_size or self.workload.batch_size,
            epochs=1_000_000,
            shuffle=False,  # the indices are shuffled, alike for all peers
            verbose=0,
            callbacks=callbacks,
        )

    def turns(self, *, rank: int) -> Turns:
        """Return the turns of this rank."""
        return Turns(rank=rank, weights=self._weights, loss=self._check_loss)

    def _weights(self) -> Iterable[Any]:
        import keras

        if keras.backend.backend() == "jax" and hasattr(self.model, "_jax_state"):
            self.model.jax_state_sync()  # within fit the weights are in the loop's state, not in the variables
        return (np.asarray(keras.ops.convert_to_numpy(v)) for v in self.model.trainable_variables)

    def _check_loss(self) -> float:
        import keras

        outputs = self.model(self.inputs[:CHECK_SAMPLES])
        return float(keras.ops.convert_to_numpy(self.loss(self.targets[:CHECK_SAMPLES], outputs)))


def ticks(turns: Turns) -> Any:
    """Return a Keras callback that tells `turns` of each step."""
    import keras

    class Ticks(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            turns.begin()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])  # JAX returns before it has computed; a step is over when its loss is there
            turns.tick()

    return Ticks()


def _layers(model: str) -> list[Any]:
    from keras import Input, layers

    if model == "lenet":
        return [
            Input((28, 28, 1)),
            layers.Conv2D(16, 5, activation="relu"), layers.MaxPooling2D(2),
            layers.Conv2D(32, 5, activation="relu"), layers.MaxPooling2D(2),
            layers.Flatten(), layers.Dense(160, activation="relu"), layers.Dense(10),
        ]  # fmt: skip
    dense = [layers.Dense(4096, activation="relu"), layers.Dense(4096, activation="relu")]
    return [Input((784,)), *dense, layers.Dense(10)]
