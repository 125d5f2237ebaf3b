"""A shuffled order that is computed and never drawn still looks drawn at random."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.data import sharding


def orders(n, count, *, seed=0):
    return np.stack([sharding.epoch_order(n, epoch=epoch, seed=seed) for epoch in range(count)])


@given(n=st.integers(1, 5000), epoch=st.integers(0, 2**20), seed=st.integers(0, 2**40))
def test_a_shuffled_order_is_a_permutation(n, epoch, seed):
    assert np.array_equal(np.sort(sharding.epoch_order(n, epoch=epoch, seed=seed)), np.arange(n))


@pytest.mark.parametrize("n", [2**16 - 1, 2**16, 2**16 + 1, 300_007])
def test_lengths_around_a_square_and_a_power_of_two_are_permuted(n):
    assert np.array_equal(np.sort(sharding.epoch_order(n, seed=3)), np.arange(n))


@pytest.mark.parametrize("n", [2, 3, 5, 16, 17, 100])
def test_every_sample_is_as_likely_at_every_position(n):
    epochs = 60 * n
    drawn = orders(n, epochs)
    counts = np.stack([np.bincount(drawn[:, position], minlength=n) for position in range(n)])
    freedom = (n - 1) ** 2  # rows and columns of the table have fixed sums
    chi_square = ((counts - epochs / n) ** 2 / (epochs / n)).sum()
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_all_orders_of_three_samples_occur_about_as_often():
    _, counts = np.unique(orders(3, 1200), axis=0, return_counts=True)
    assert len(counts) == 6
    assert ((counts - 200) ** 2 / 200).sum() < 5 + 5 * math.sqrt(10)


@pytest.mark.parametrize("n", [1000, 65_536, 100_003])
def test_neighbours_are_not_correlated_at_any_distance(n):
    order = sharding.epoch_order(n, seed=7).astype(float)
    # Distances of the two digits' bases, too, where a Feistel network of few rounds shows its grid.
    for distance in (1, 2, math.isqrt(n), math.isqrt(n) + 1, n // 2):
        correlation = np.corrcoef(order[:-distance], order[distance:])[0, 1]
        assert abs(correlation) < 5 / math.sqrt(n - distance)


@pytest.mark.parametrize("n", [1000, 100_003])
def test_a_batch_is_drawn_from_the_whole_dataset(n):
    order = sharding.epoch_order(n, seed=11)
    batches = order[: n // 100 * 100].reshape(100, -1)
    deviation = (batches.mean(axis=1) - (n - 1) / 2) / (n / math.sqrt(12 * batches.shape[1]))
    assert np.abs(deviation).max() < 5
    assert 0.5 < deviation.std() < 1.5


def test_epochs_and_seeds_are_independent():
    n = 10_000
    drawn = [sharding.epoch_order(n, epoch=epoch, seed=seed) for epoch in range(3) for seed in range(3)]
    for index, one in enumerate(drawn):
        for other in drawn[:index]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(n)
            assert (one == other).sum() < 12  # of random orders about one position in n agrees


@pytest.mark.parametrize("rank", [0, 2])
def test_a_shard_takes_memory_that_does_not_grow_with_the_dataset(rank):
    tracemalloc = pytest.importorskip("tracemalloc")
    tracemalloc.start()
    try:
        shard = sharding.shard(10**12, rank=rank, size=3, epoch=1, seed=1)
        for step in (0, 1, 1000, 10**8):
            assert len(shard[step * 64 : (step + 1) * 64]) == 64
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


@given(n=st.integers(1, 9000), size=st.integers(1, 4), batch=st.integers(1, 700), shuffle=st.booleans())
def test_a_shard_read_batch_by_batch_or_whole_or_one_by_one_is_the_same(n, size, batch, shuffle):
    options = {"rank": size - 1, "size": size, "seed": 5, "shuffle": shuffle}
    shard = sharding.shard(n, **options)
    whole = sharding.shard_indices(n, **options)
    parts = [shard[start : start + batch] for start in range(0, len(shard), batch)]
    assert np.array_equal(np.concatenate([whole[:0], *parts]), whole)
    assert list(sharding.shard(n, **options)) == whole.tolist()
    assert len(shard) == len(whole) == len(range(size - 1, n, size))
