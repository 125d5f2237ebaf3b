"""Every sample exactly once an epoch, at any world size and any length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.data import sharding

lengths = st.integers(0, 300)
sizes = st.integers(1, 17)
seeds = st.integers(0, 2**32)


@given(n=lengths, size=sizes, epoch=st.integers(0, 5), seed=seeds, shuffle=st.booleans())
def test_every_index_belongs_to_exactly_one_rank(n, size, epoch, seed, shuffle):
    options = {"size": size, "epoch": epoch, "seed": seed, "shuffle": shuffle}
    shards = [sharding.shard_indices(n, rank=rank, **options) for rank in range(size)]
    assert sorted(np.concatenate(shards).tolist()) == list(range(n))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@given(n=lengths, size=sizes, batch=st.integers(1, 20), seed=seeds)
def test_a_step_of_all_ranks_is_a_batch_of_one_process(n, size, batch, seed):
    order = sharding.epoch_order(n, seed=seed)
    shards = [sharding.shard_indices(n, rank=rank, size=size, seed=seed) for rank in range(size)]
    steps = sharding.steps_per_epoch(n, batch_size=batch, size=size)
    for step in range(steps):
        held = np.concatenate([shard[step * batch : (step + 1) * batch] for shard in shards])
        whole = order[step * batch * size : (step + 1) * batch * size]
        assert sorted(held) == sorted(whole)
        assert len(held) == sharding.samples_in_step(step, n, batch_size=batch, size=size) > 0
    assert sharding.samples_in_step(steps, n, batch_size=batch, size=size) == 0


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [sharding.epoch_order(50, epoch=epoch, seed=seed).tolist() for epoch in range(3) for seed in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    assert sharding.epoch_order(50, epoch=1, seed=2).tolist() == sharding.epoch_order(50, epoch=1, seed=2).tolist()


def test_nobodys_random_state_is_touched():
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    sharding.shard_indices(100, rank=0, size=2)
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_an_error_that_shows_it(rank, size):
    with pytest.raises(ValueError, match=f"rank={rank}, size={size}"):
        sharding.shard_indices(10, rank=rank, size=size)


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True, None])
def test_a_batch_size_that_is_no_count_is_an_error_that_shows_it(batch_size):
    with pytest.raises(ValueError, match="Received: batch_size="):
        sharding.check_batch_size(batch_size)


def test_an_order_has_the_datasets_length():
    assert len(sharding.EpochOrder(7)) == 7


def test_negative_lengths_and_seeds_are_errors():
    with pytest.raises(ValueError, match="num_samples=-1"):
        sharding.epoch_order(-1)
    with pytest.raises(ValueError, match="seed=-1"):
        sharding.epoch_order(1, seed=-1)
