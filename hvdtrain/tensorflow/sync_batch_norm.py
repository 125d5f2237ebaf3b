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

    Attributes:
        batch_weight: what this rank's gradients of a batch are multiplied with after backward, a `BatchWeight` that the
            Trainer sets; None for 1. A batch of weight 0 does not count in the statistics.
    """

    batch_weight: Any = None

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
        weight = None if self.batch_weight is None else tf.cast(self.batch_weight.read(), tf.float64)
        if weight is not None:
            count *= tf.cast(weight > 0.0, tf.float64)
        sums = tf.math.multiply_no_nan(sums, count)  # an empty batch has no mean
        total = _sum_over_ranks(tf.concat([[count], tf.reshape(sums, [-1])], axis=0), weight)
        means = tf.reshape(tf.math.divide_no_nan(total[1:], total[0]), [2, -1])
        return tf.cast(means[0], mean.dtype), tf.cast(means[1] - tf.square(means[0]), variance.dtype)


def _sum_over_ranks(values: Any, weight: Any) -> Any:
    """Return the sum over ranks; its gradient adds up gradients of one scale, and returns this rank's own scale."""
    if weight is None:
        return allreduce(values, op=Sum)

    @tf.custom_gradient
    def summed(mine: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            # A filler's gradient may not be finite.
            weighted = allreduce(tf.math.multiply_no_nan(upstream, weight), op=Sum)
            return tf.math.divide_no_nan(weighted, weight)

        return allreduce(mine, op=Sum), gradient

    return summed(values)
