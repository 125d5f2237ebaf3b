"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.keras.backends.tensorflow import untraced
from hvdtrain.keras.basics import Sum
from hvdtrain.keras.reduction import GradientReduction
from hvdtrain.tensorflow.ops import allreduce


@keras.saving.register_keras_serializable("hvdtrain")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """BatchNormalization whose mean and variance are the global batch's; local batches may differ in length.

    Takes BatchNormalization's own arguments. Every rank must call it equally often while it trains.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ValueError(f"SyncBatchNormalization has no fused form. Received: fused={fused}")
        super().__init__(**kwargs)
        self.supports_jit = False  # Horovod's operations do not compile under XLA

    @untraced
    def _moments(self, inputs: Any, mask: Any) -> Any:
        mean, variance = super()._moments(inputs, mask)
        if not GradientReduction().active():
            return mean, variance
        count = (
            tf.size(inputs) // tf.shape(inputs)[self.axis] if mask is None else tf.reduce_sum(tf.cast(mask, tf.int32))
        )
        # Of vectors as long as the channels, in float64: there a difference of squares loses nothing.
        count, mean64, variance64 = (tf.cast(each, tf.float64) for each in (count, mean, variance))
        sums = tf.stack([mean64, variance64 + tf.square(mean64)])  # (2, channels)
        sums = tf.math.multiply_no_nan(sums, count)  # an empty batch has no mean
        total = allreduce(tf.concat([[count], tf.reshape(sums, [-1])], axis=0), op=Sum)
        means = tf.reshape(total[1:] / total[0], [2, -1])
        return tf.cast(means[0], mean.dtype), tf.cast(means[1] - tf.square(means[0]), variance.dtype)
