"""BatchNormalization: what is frozen keeps its statistics; what would not be synchronized is refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras_jit import JIT

import hvdtrain
from hvdtrain.distributed import world

pytestmark = pytest.mark.world_size(2, 3)


def data(rows=23):
    generator = np.random.default_rng(0)
    return generator.normal(size=(rows, 4)).astype(np.float32), generator.normal(size=(rows, 3)).astype(np.float32)


def model(norm):
    net = keras.Sequential([keras.Input((4,)), norm, keras.layers.Dense(3)])
    norm.moving_mean.assign(np.float32([0.1, 0.2, 0.3, 0.7]) + world.current().rank)
    return net


@pytest.mark.three_ranks
@pytest.mark.every_backend
def test_a_frozen_batch_normalization_keeps_its_statistics_bit_for_bit():
    norm = keras.layers.BatchNormalization(trainable=False)
    net = model(norm)
    before = [np.array(keras.ops.convert_to_numpy(v)) for v in norm.variables]
    roots = world.current().broadcast_object([value.tolist() for value in before], name="roots")
    net.compile(keras.optimizers.SGD(0.1), loss="mse", jit_compile=JIT)
    hvdtrain.Trainer(net, accumulate=2).fit(data(), validation=data(5), epochs=2, batch_size=3, progress=False)
    assert [keras.ops.convert_to_numpy(v).tolist() for v in norm.variables] == roots


def test_synchronized_batch_normalization_is_refused_with_the_way_out():
    norm = keras.layers.BatchNormalization(name="norm")
    norm.synchronized = True  # an argument on TensorFlow alone
    with pytest.raises(ValueError, match=r"synchronized=True.*layer norm on . ranks\. Use GroupNormalization"):
        hvdtrain.Trainer(model(norm), optimizer="sgd", loss="mse")
