"""Every kind of data: each sample on exactly one rank, once an epoch, and every rank in step."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.data.reading import as_source

BATCH = 3


def seen_by_all(world, data, *, epoch=0, shuffle=True):
    """Return (samples over all ranks, in rank order; number of steps, equal on all ranks)."""
    source = as_source(data, batch_size=BATCH, world=world, seed=0)
    mine, steps = [], 0
    for batch in source.epoch(epoch, shuffle=shuffle):
        steps += 1
        local = np.array([batch.local_count, 1])
        total, ranks = world.allreduce(local, name="in_step")
        assert (total, ranks) == (batch.global_count, world.size)
        if batch.local_count:
            mine.append(np.asarray(batch.inputs)[:, 0].astype(np.int64))
    assert source.steps in (None, steps)
    gathered = world.allgather(np.concatenate([np.zeros(0, np.int64), *mine]))
    return gathered.tolist(), steps


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("num_samples", [1, 3, pytest.param(20, marks=pytest.mark.on_keras), 36])
def test_every_sample_is_seen_exactly_once(kit, world, num_samples):
    for name, data in kit.datasets(num_samples).items():
        for epoch in (0, 1):
            seen, _ = seen_by_all(world, data, epoch=epoch)
            assert sorted(seen) == list(range(num_samples)), name


@pytest.mark.world_size(2, 3)
def test_validation_keeps_one_order_and_training_does_not(kit, world):
    x = np.arange(30, dtype=np.float32)[:, None]
    first, second = (seen_by_all(world, (x, x), epoch=epoch)[0] for epoch in (0, 1))
    assert first != second
    still = [seen_by_all(world, (x, x), epoch=epoch, shuffle=False)[0] for epoch in (0, 1)]
    assert still[0] == still[1]


@pytest.mark.on_keras
@pytest.mark.world_size(2)
def test_orders_that_differ_between_ranks_are_refused_or_replaced(kit, world):
    kit.check_random_orders(lambda data: seen_by_all(world, data), num_samples=24)
