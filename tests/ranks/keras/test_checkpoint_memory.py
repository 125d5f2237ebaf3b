"""Checkpoints of Keras models are written and read array by array: what ranks hold meanwhile."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from peak_memory import Measured, arrays_of

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.distributed import tuning

pytestmark = pytest.mark.world_size(2)

WIDTH, LAYERS = 2900, 3
ARRAY = WIDTH * WIDTH * 4  # bytes
PIECES = 0.5  # arrays; what is sent at once is copied several times
# Of nine arrays. Torch reads and receives in the memory of variables; JAX and TensorFlow replace a variable's memory.
# TensorFlow keeps the replaced memory in a pool (oneDNN's), so that each weight may be in new memory.
LOADING = {"torch": 0.5, "jax": 2.0, "tensorflow": 1.0 + LAYERS}[keras.backend.backend()]


def make(width=WIDTH, **options):
    layers = [keras.layers.Dense(width, use_bias=False) for _ in range(LAYERS)]
    net = keras.Sequential([keras.Input((width,)), *layers])
    net.get_weights()  # JAX computes initial values in the background until somebody reads them
    return net, {"optimizer": keras.optimizers.Adam(1e-4), "loss": "mse", "shard": "optimizer", **options}


def fit(trainer, *callbacks, epochs=1):
    x = np.ones((12, trainer.model.inputs[0].shape[1]), np.float32)
    trainer.fit((x, x), batch_size=6, epochs=epochs, callbacks=callbacks, progress=False, run_dir=None)


@pytest.fixture
def world():
    # Else it depends on where small blocks lie whether glibc can use a freed array's memory again.
    tuning.return_large_blocks()
    return hvdtrain.init()


@pytest.mark.every_backend
def test_saving_shards_takes_the_memory_of_one_array_on_rank_0(world, shared_tmp_path):
    net, others = make()
    trainer = hvdtrain.Trainer(net, **others)
    fit(trainer)
    trainer.save(shared_tmp_path / "warm")
    with Measured() as saving:
        trainer.save(shared_tmp_path / "one")
    root, other = arrays_of(world, saving.peak, ARRAY)
    assert root <= 1.0 + PIECES, (root, other)
    assert other <= PIECES, (root, other)


def test_saving_shards_in_the_background_takes_the_memory_of_one_array_on_rank_0(world, shared_tmp_path):
    found = []

    class Save(Callback):
        to = Checkpoint(shared_tmp_path / "runs", every_epochs=100).checkpoint

        def on_epoch_end(self, trainer, epoch, logs):
            with Measured() as saving:
                trainer.save_checkpoint(self.to)
            found.append(arrays_of(world, saving.peak, ARRAY))

    net, others = make()
    fit(hvdtrain.Trainer(net, **others), Save(), epochs=2)
    root, other = found[-1]
    assert root <= 1.0 + PIECES, found
    assert other <= PIECES, found


@pytest.mark.every_backend
def test_loading_takes_the_memory_of_few_arrays_beyond_what_a_rank_keeps(world, shared_tmp_path):
    net, others = make()
    trainer = hvdtrain.Trainer(net, **others)
    fit(trainer)
    trainer.save(shared_tmp_path / "one")
    del trainer, net, others
    for _ in range(2):  # once to warm up
        net, others = make()
        with Measured() as loading:
            loaded = hvdtrain.Trainer.load(shared_tmp_path / "one", net, **others)
        held = arrays_of(world, loading.peak - 2 * LAYERS * ARRAY / 2, ARRAY)
        del loaded, net, others
    assert max(held) <= LOADING + PIECES, held
