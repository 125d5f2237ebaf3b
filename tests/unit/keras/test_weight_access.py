"""A Keras model's weights and optimizer state, as strategies of synchronization see them."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")

import hvdtrain  # noqa: E402
from hvdtrain.distributed.world import SoloWorld  # noqa: E402
from hvdtrain.keras.weight_access import WeightAccess  # noqa: E402


def compiled(**options):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, use_bias=False)])
    model.compile(optimizer=keras.optimizers.Adam(**options), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_moments_are_what_has_a_value_for_each_weight():
    model = compiled(use_ema=True, gradient_accumulation_steps=2)
    access = WeightAccess(model, SoloWorld())
    assert [each.shape for each in access.weights()] == [(6,)]
    assert [each.shape for each in access.moments()] == [(3 * 6,)]  # two of Adam and the moving average


class Scaled(keras.layers.Layer):
    """Has one weight, without dimensions."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), name="scale")

    def call(self, inputs):
        return inputs * self.scale


def test_the_momentum_of_a_scalar_weight_is_a_moment_and_a_loss_scale_is_none():
    model = keras.Sequential([keras.Input((2,)), Scaled()])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(momentum=0.9))
    model.compile(optimizer=optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    assert [each.shape for each in WeightAccess(model, SoloWorld()).moments()] == [(1,)]


def test_what_is_set_is_read():
    model = compiled()
    access = WeightAccess(model, SoloWorld())
    weights, moments = np.arange(6, dtype=np.float32), np.arange(12, dtype=np.float32)
    access.set_weights([weights])
    access.set_moments([moments])
    np.testing.assert_array_equal(access.weights()[0], weights)
    np.testing.assert_array_equal(access.moments()[0], moments)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(model.layers[0].kernel), weights.reshape(2, 3))


class Higher(SoloWorld):
    """Another rank has larger numbers."""

    def allreduce(self, array, op="sum", *, name="host"):
        return np.maximum(array, array + 5) if op == "max" else array


def test_counters_become_the_largest_and_loss_scales_the_smallest():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=64.0), loss="mse")
    model.optimizer.build(model.trainable_variables)
    WeightAccess(model, Higher()).agree()
    assert int(model.optimizer.inner_optimizer.iterations) == 5
    assert float(model.optimizer.dynamic_scale) == 59.0


@pytest.mark.usefixtures("alone")
def test_a_model_that_is_not_built_is_refused():
    model = keras.Sequential([keras.layers.Dense(3)])
    with pytest.raises(ValueError, match=r"sync=LocalSGD.*which is not built: .* give it a keras\.Input, or build it"):
        hvdtrain.Trainer(model, optimizer="sgd", loss="mse", sync=hvdtrain.LocalSGD(4))
