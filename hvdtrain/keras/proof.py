"""A training step between ranks beside one process's: what `hvdtrain build` proves Horovod for TensorFlow with."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed.world import World
from hvdtrain.keras.wrapping import DistributedOptimizer


def step_difference(world: World) -> float:
    """Return the largest difference of a weight between the ranks' step and one process's; all ranks call it."""
    numbers = np.random.default_rng(0)
    inputs = numbers.standard_normal((8, world.size, 5)).astype(np.float32)
    targets = numbers.standard_normal((8, world.size, 3)).astype(np.float32)
    start = numbers.standard_normal((5, 3)).astype(np.float32)

    def step(optimizer: keras.optimizers.Optimizer, part: slice) -> np.ndarray:
        weights = keras.Variable(start)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((inputs[:, part] @ weights.value - targets[:, part]) ** 2)
        optimizer.apply(tape.gradient(loss, [weights.value]), [weights])
        return np.asarray(weights)

    ours = step(DistributedOptimizer(keras.optimizers.SGD(0.1)), slice(world.rank, world.rank + 1))
    theirs = step(keras.optimizers.SGD(0.1), slice(None))
    return float(np.abs(ours - theirs).max())
