"""Loops of the user's own, made to work on all ranks by `prepare`: again the weights of one process."""

from __future__ import annotations

import numpy as np
import pytest
from test_trainer import BATCH, assert_equal_on_all_ranks, data, one_process_groups


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("num_samples", [1, 2, 24, pytest.param(50, marks=pytest.mark.every_backend)])
def test_an_own_loop_trains_the_weights_of_one_process(kit, world, num_samples):
    x, y = data(num_samples)
    net, reference = kit.model(seed=world.rank), kit.model(seed=0)
    kit.own_loop(net, x, y, batch_size=BATCH, epochs=2)
    kit.optimizer_steps(reference, one_process_groups(x, y, size=world.size, epochs=2))
    for ours, theirs in zip(kit.weights(net), kit.weights(reference), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    assert_equal_on_all_ranks(world, kit.weights(net))


@pytest.mark.on_keras
@pytest.mark.world_size(2)
def test_data_that_can_only_be_iterated_is_refused_with_the_way_out(kit, world):
    with pytest.raises(TypeError, match=r"Use hvdtrain\.Trainer"):
        kit.prepare_stream(kit.model())
