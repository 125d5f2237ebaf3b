"""Checkpoints of Keras models are read array by array: what ranks do if a disk fails meanwhile."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.errors import HvdTrainError

pytestmark = pytest.mark.world_size(2)

LAYERS = 4


@pytest.fixture
def world():
    return hvdtrain.init()


def model(width):
    layers = [keras.layers.Dense(width, use_bias=False) for _ in range(LAYERS)]
    net = keras.Sequential([keras.Input((width,)), *layers])
    return net, {"optimizer": keras.optimizers.Adam(1e-4), "loss": "mse"}


def saved(folder, width, **options):
    net, others = model(width)
    trainer = hvdtrain.Trainer(net, **others, **options)
    x = np.ones((4, width), np.float32)
    trainer.fit((x, x), batch_size=2, progress=False, run_dir=None)
    trainer.save(folder)
    return trainer


@pytest.mark.every_backend
@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_a_disk_that_fails_while_a_rank_reads_ends_all_ranks(world, shared_tmp_path, fail_reads, shard):
    saved(shared_tmp_path / "one", 64, shard=shard)
    done = fail_reads(after=LAYERS + 4, message="optimizer.safetensors cannot be read (Input/output error)")
    net, others = model(64)
    with pytest.raises(HvdTrainError, match="Input/output error"):
        hvdtrain.Trainer.load(shared_tmp_path / "one", net, shard=shard, **others)
    assert bool(done) == world.is_root
