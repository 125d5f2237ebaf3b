"""Ranks that do not divide the data, each a process set of its own: every rank trains as one process does."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from test_trainer import BATCH, data

from hvdtrain.distributed import world as worlds


@pytest.fixture
def apart(world):
    hvd = importlib.import_module(f"horovod.{world.engine}")
    sets = [hvd.add_process_set([rank]) for rank in range(world.size)]
    world.data_set = sets[world.rank]
    yield world
    del world.data_set
    for each in sets:
        hvd.remove_process_set(each)


def train(kit, folder, **options):
    x, y = data(30)
    given = {"validation": (x[:7], y[:7]), "batch_size": BATCH, "checkpoint_dir": folder, "progress": False}
    for epochs in (1, 2):  # the second trainer resumes
        trainer = kit.trainer(net := kit.norm_model(), lr_scaling="linear", warmup_epochs=1, **options)
        history = trainer.fit((x, y), epochs=epochs, **given)
    metrics = {name: each for name, each in history.items() if name not in ("seconds", "samples_per_s")}
    return kit.everything(net), metrics


@pytest.mark.on_keras
@pytest.mark.world_size(2)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_rank_that_divides_its_data_with_nobody_equals_one_process(kit, apart, shared_tmp_path, accumulate):
    weights, metrics = train(kit, shared_tmp_path / "ranks", accumulate=accumulate)
    alone = worlds.SoloWorld()
    alone.data_set = apart.data_set  # for Keras's optimizer, which asks Horovod how many ranks there are
    worlds.use(alone)
    try:
        expected, expected_metrics = train(kit, shared_tmp_path / f"rank-{apart.rank}", accumulate=accumulate)
    finally:
        worlds.use(apart)
    assert metrics == expected_metrics
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(one, other)
