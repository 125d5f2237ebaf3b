"""Layers whose activations backward computes again train the same weights on all ranks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras.ops import convert_to_numpy as to_numpy

import hvdtrain

SAMPLES = 21  # of batches of 4 on two ranks; in the last step, one rank has most


class Block(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)
        self.up, self.down = keras.layers.Dense(32, "tanh"), keras.layers.Dense(16)

    def call(self, x):
        return x + self.down(self.drop(self.up(self.norm(x))))


def fit(rule, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(16), Block(), Block(), keras.layers.Dense(3)])
    random = np.random.default_rng(0)
    data = tuple(random.normal(size=(SAMPLES, width)).astype(np.float32) for width in (4, 3))
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss="mse", checkpoint_activations=rule, **options)
    trainer.fit(data, batch_size=4, epochs=2, progress=False, run_dir=None)
    return [to_numpy(each) for each in model.variables]


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 2, "nan_policy": "skip"}, {"sync": hvdtrain.Delayed()}, {"sync": hvdtrain.LocalSGD(every=2)}],
    ids=["plain", "accumulate", "delayed", "local_sgd"],
)
def test_weights_statistics_and_seeds_are_the_same(options):
    """Bit for bit on torch. TensorFlow and JAX compile the longer step, and add in another order."""
    atol = 0 if keras.backend.backend() == "torch" else 2e-6
    for plain, again in zip(fit(False, **options), fit("blocks", **options), strict=True):
        np.testing.assert_allclose(again, plain, rtol=0, atol=atol)
