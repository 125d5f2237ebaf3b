"""Layers that a callback unfreezes train on in a run that is resumed, on all ranks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras.ops import convert_to_numpy as to_numpy

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint


class Unfreeze(Callback):
    def on_epoch_begin(self, trainer, epoch):
        if epoch == 1:
            model = trainer.model
            model.get_layer("bottom").trainable = True
            model.optimizer.built, model.train_function = False, None
            model.optimizer.build(model.trainable_variables)


class Stop(Callback):
    def on_epoch_end(self, trainer, epoch, logs):
        if epoch == 2:
            raise KeyboardInterrupt


def fit(*hooks, **options):
    random = np.random.default_rng(0)
    initial = [keras.initializers.GlorotUniform(seed=seed) for seed in range(2)]
    bottom = keras.layers.Dense(6, "tanh", kernel_initializer=initial[0], name="bottom", trainable=False)
    head = keras.layers.Dense(3, kernel_initializer=initial[1], name="head")
    model = keras.Sequential([keras.Input((4,)), bottom, head])
    trainer = hvdtrain.Trainer(model, optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse", **options)
    data = [random.normal(size=(12, width)).astype(np.float32) for width in (4, 3)]
    try:
        trainer.fit(tuple(data), batch_size=3, epochs=4, callbacks=[Unfreeze(), *hooks], progress=False, run_dir=None)
    except KeyboardInterrupt:
        return None
    return [to_numpy(each) for each in model.weights]


@pytest.mark.every_backend
@pytest.mark.world_size(2)
def test_unfrozen_layers_train_on_after_a_resume(shared_tmp_path):
    straight = fit()
    assert fit(Checkpoint(shared_tmp_path), Stop()) is None
    resumed = fit(Checkpoint(shared_tmp_path))
    for one, two in zip(straight, resumed, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.world_size(2)
def test_unfrozen_layers_train_on_in_shards_also_after_a_resume_with_them(shared_tmp_path):
    straight = fit()
    assert fit(Checkpoint(shared_tmp_path), Stop(), shard="optimizer") is None
    resumed = fit(Checkpoint(shared_tmp_path), shard="optimizer")
    for one, two in zip(straight, resumed, strict=True):
        np.testing.assert_array_equal(one, two)


def fits_with_changes(bottom_first, **options):
    """Return the trainer, and weights after each of two fits; between them, a layer is frozen or unfrozen."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(6, "tanh", name="bottom"), keras.layers.Dense(3, name="head")]
    model = keras.Sequential([keras.Input((4,)), *layers])
    layers[0].trainable = bottom_first
    trainer = hvdtrain.Trainer(model, optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse", **options)
    random = np.random.default_rng(0)
    data = tuple(random.normal(size=(12, width)).astype(np.float32) for width in (4, 3))
    trainer.fit(data, batch_size=3, epochs=1, progress=False, run_dir=None)
    between = [to_numpy(each) for each in model.weights]
    layers[0].trainable = not bottom_first
    trainer.fit(data, batch_size=3, epochs=2, progress=False, run_dir=None)
    return trainer, between, [to_numpy(each) for each in model.weights]


@pytest.mark.every_backend
@pytest.mark.world_size(2)
@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_layers_that_change_between_fits_are_trained_or_not_from_then_on(shard):
    """Keras's compiled step would train those of before."""
    for bottom_first in (True, False):
        trainer, before, after = fits_with_changes(bottom_first, shard=shard)
        trained = [bool((one != two).any()) for one, two in zip(before, after, strict=True)]
        assert trained == [not bottom_first] * 2 + [True] * 2
        is_built_again = not bottom_first or keras.backend.backend() == "jax"  # whose optimizer has no others
        is_said = any("other layers are trainable" in each for each in trainer.decisions)
        assert is_said == (is_built_again and trainer.world.is_root)
