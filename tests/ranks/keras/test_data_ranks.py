"""Ranks that do not divide the data, each a process set of its own: every rank trains as one process does."""

import importlib

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.distributed import world as worlds


@pytest.fixture
def apart():
    world = hvdtrain.init("keras")
    horovod = importlib.import_module(f"horovod.{world.engine}")
    sets = [horovod.add_process_set([rank]) for rank in range(world.size)]
    world.data_set = sets[world.rank]
    yield world
    del world.data_set
    for each in sets:
        horovod.remove_process_set(each)


def train(kit, folder):
    """Train an epoch, and resume for a second one; return weights, statistics and metrics."""
    x, y = kit.data()
    for epochs in (1, 2):
        keras.utils.set_random_seed(0)
        dense, norm = keras.layers.Dense(4), keras.layers.BatchNormalization()
        net = keras.Sequential([keras.Input(x.shape[1:]), dense, norm, keras.layers.Dense(3)])
        trainer = hvdtrain.Trainer(
            net, optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse", metrics=["mae"], lr_scaling="linear",
            warmup_epochs=1, accumulate=2,
        )  # fmt: skip
        given = {"epochs": epochs, "batch_size": 5, "validation": (x[:7], y[:7]), "checkpoint_dir": str(folder)}
        trainer.fit((x, y), progress=False, run_dir=None, **given)
    metrics = {name: each for name, each in trainer.history.items() if name not in ("seconds", "samples_per_s")}
    return net.get_weights(), metrics


@pytest.mark.world_size(2)
def test_a_rank_that_divides_its_data_with_nobody_equals_one_process(kit, apart, shared_tmp_path):
    weights, metrics = train(kit, shared_tmp_path / "ranks")
    alone = worlds.SoloWorld()
    alone.data_set = apart.data_set  # for Keras's optimizer, which asks Horovod how many ranks there are
    worlds.use(alone)
    try:
        expected, expected_metrics = train(kit, shared_tmp_path / f"rank-{apart.rank}")
    finally:
        worlds.use(apart)
    assert metrics == expected_metrics
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(one, other)
