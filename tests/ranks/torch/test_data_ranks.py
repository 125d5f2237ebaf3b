"""Ranks that do not divide the data, each a process set of its own: every rank trains as one process does."""

import numpy as np
import pytest
import torch
import trainer_kit as kit

from hvdtrain.distributed import world as worlds


@pytest.fixture
def apart(hvd, world):
    sets = [hvd.add_process_set([rank]) for rank in range(world.size)]
    world.data_set = world.part_set = sets[world.rank]
    yield world
    del world.data_set, world.part_set
    for each in sets:
        hvd.remove_process_set(each)


def train(folder, **options):
    """Train an epoch, and resume for a second one; return weights, statistics and metrics."""
    for epochs in (1, 2):
        net = kit.model()
        net.insert(1, torch.nn.BatchNorm1d(16))
        trainer = kit.make_trainer(net, lr_scaling="linear", warmup_epochs=1, metrics=["accuracy"], **options)
        kit.run(trainer, epochs=epochs, checkpoint_dir=str(folder), validation=kit.data(7))
    metrics = {name: each for name, each in trainer.history.items() if name not in ("seconds", "samples_per_s")}
    return [each.numpy() for each in net.state_dict().values()], metrics


@pytest.mark.world_size(2)
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=str)
def test_a_rank_that_divides_its_data_with_nobody_equals_one_process(apart, shared_tmp_path, options):
    weights, metrics = train(shared_tmp_path / "ranks", **options)
    worlds.use(worlds.SoloWorld())
    try:
        expected, expected_metrics = train(shared_tmp_path / f"rank-{apart.rank}", **options)
    finally:
        worlds.use(apart)
    assert metrics == expected_metrics
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(one, other)
