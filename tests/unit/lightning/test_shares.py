"""Each rank's share of batches: together they are the batches of one process, and weights are those of its mean."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from hvdtrain.lightning.shares import Share, share_batches, share_of


def shares(samples, size, batch, *, drop_last=False, repeats=True):
    ranks = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    options = {"batch_size": batch, "drop_last": drop_last, "repeats": repeats}
    return [Share(SequentialSampler(range(samples)), rank, **options) for rank in ranks]


numbers = {"samples": st.integers(0, 60), "size": st.integers(1, 5), "batch": st.integers(1, 7)}


@given(**numbers, drop_last=st.booleans())
def test_ranks_together_train_the_batches_of_one_process(samples, size, batch, drop_last):
    found = shares(samples, size, batch, drop_last=drop_last)
    of_ranks = [list(BatchSampler(each, batch, drop_last=drop_last)) for each in found]
    alone = list(BatchSampler(SequentialSampler(range(samples)), size * batch, drop_last=drop_last))
    assert [len(batches) for batches in of_ranks] == [len(alone)] * size
    assert [len(each) for each in found] == [sum(map(len, batches)) for batches in of_ranks]
    for place, (whole, *parts) in enumerate(zip(alone, *of_ranks, strict=True)):
        weights = [each.weight(place) for each in found]
        counted = [index for part, weight in zip(parts, weights, strict=True) if weight for index in part]
        assert sorted(counted) == whole
        # The mean over ranks of weighted means is the mean over samples.
        means = [weight * sum(part) / len(part) for part, weight in zip(parts, weights, strict=True)]
        assert sum(means) / size == pytest.approx(sum(whole) / len(whole))


@given(**numbers)
def test_evaluation_takes_each_sample_once(samples, size, batch):
    found = shares(samples, size, batch, repeats=False)
    assert sorted(index for each in found for index in each) == list(range(samples))
    # A rank that has none of the last batch counts it as well, so that half of all batches is the same on all ranks.
    alone = BatchSampler(SequentialSampler(range(samples)), size * batch, drop_last=False)
    assert [len(BatchSampler(each, batch, drop_last=False)) for each in found] == [len(alone)] * size


@pytest.mark.parametrize("samples", [8, 10, 11])
def test_ranks_hold_even_shares_of_a_last_batch_that_they_can_divide(samples):
    assert [each.is_even for each in shares(samples, 2, 4)] == [samples % 2 == 0] * 2
    assert all(each.is_even for each in shares(samples, 2, 4, drop_last=True))


def test_a_weight_does_not_depend_on_who_reads_the_data():
    (_, second) = shares(5, 2, 2)
    next(iter(second))
    assert [second.weight(place) for place in range(2)] == [1.0, 0.0]


def test_a_loader_that_lightning_has_not_divided_stays_as_it_is():
    class Batches(BatchSampler):
        """Another class, which may make other batches."""

    world, data = SimpleNamespace(rank=0, size=2, is_root=True), list(range(9))
    one_of_two = {"num_replicas": 2, "rank": 0}
    left_alone = [
        DataLoader(data, batch_size=4),
        DataLoader(data, batch_size=None),
        DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=3, rank=0)),
        DataLoader(data, batch_size=4, sampler=DistributedSampler(data, drop_last=True, **one_of_two)),
        DataLoader(data, batch_sampler=[[0, 1], [2]]),
        data,
    ]
    assert [share_of(share_batches(each, world, repeats=True)) for each in left_alone] == [None] * len(left_alone)
    others = DataLoader(data, batch_sampler=Batches(DistributedSampler(data, shuffle=False, **one_of_two), 4, False))
    assert [each.tolist() for each in share_batches(others, world, repeats=False)] == [[0, 2, 4, 6], [8]]
    assert share_of(others) is None  # nobody knows which batches of ranks one process would have in one
    divided = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False, **one_of_two))
    assert [each.tolist() for each in share_batches(divided, world, repeats=True)] == [[0, 2, 4, 6], [8]]
