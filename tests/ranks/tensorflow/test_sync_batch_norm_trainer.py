"""A SyncBatchNormalization in the Trainer: uneven steps train what one process trains."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdtrain
import hvdtrain.tensorflow as hvd
from hvdtrain.data import sharding

pytestmark = [pytest.mark.world_size(2, 3), pytest.mark.in_graphs]
BATCH = 12  # of all ranks


def model(norm):
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), norm, keras.layers.Dense(3)])
    generator = np.random.default_rng(1)
    for layer in (net.layers[0], net.layers[-1]):
        layer.set_weights([generator.normal(size=w.shape).astype(np.float32) * 0.5 for w in layer.get_weights()])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.SGD(0.1), loss=loss, run_eagerly=True, jit_compile=False)
    return net


@pytest.mark.parametrize("num_samples", [26, 29], ids=["a rank without samples or with one", "uneven"])
def test_uneven_steps_train_what_one_process_trains(num_samples):
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(num_samples, 4)).astype(np.float32), generator.integers(0, 3, num_samples)
    ours, plain = model(hvd.SyncBatchNormalization()), model(keras.layers.BatchNormalization())
    size = hvdtrain.init("tensorflow").size
    hvdtrain.Trainer(ours).fit((x, y), epochs=1, batch_size=BATCH // size, progress=False, run_dir=None)
    order = sharding.epoch_order(num_samples, epoch=0)
    for first in range(0, num_samples, BATCH):
        rows = order[first : first + BATCH]
        plain.train_on_batch(x[rows], y[rows])
    for mine, theirs in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)  # two samples leave gradients near zero
