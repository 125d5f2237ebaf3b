"""An epoch that is gone on with, on any number of ranks each time: every sample once, and nothing spent on the past."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.data.reading import as_source
from hvdtrain.data.sources import Consumed, IndexedSource, IteratedSource, Sharded
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import SoloWorld
from hvdtrain.errors import HvdTrainError


class FakeWorld(SoloWorld):
    def __init__(self, rank, size):
        super().__init__()
        self.rank, self.size = rank, size


legs = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=5
)  # (ranks, batch_size, steps until the run is stopped)


def sources(make, size):
    return [make(FakeWorld(rank, size)) for rank in range(size)]


def run(make_leg, legs, *, epoch=3):
    """Go through an epoch in legs, the last of them to its end; return the samples that all ranks saw, in order."""
    seen, after = [], Consumed()
    for index, (size, batch_size, steps) in enumerate(legs):
        iterators = [
            source.epoch(epoch, shuffle=True, after=after)
            for source in sources(lambda world, b=batch_size: make_leg(world, b), size)
        ]
        for taken, step in enumerate(zip(*iterators, strict=True)):
            if index + 1 < len(legs) and taken == steps:
                break
            assert {batch.global_count for batch in step} == {sum(batch.local_count for batch in step)}
            seen += [int(v) for batch in step if batch.local_count for v in batch.inputs[: batch.local_count, 0]]
            after = Consumed(after.samples + step[0].global_count, after.batches + size, size)
    return seen


@given(st.integers(1, 60), legs)
def test_every_sample_once_whatever_the_ranks_and_batches_of_each_leg(num_samples, legs):
    x = np.arange(num_samples)[:, None]

    def make(world, batch_size):
        source = as_source((x,), batch_size=batch_size, world=SoloWorld(), seed=7)
        return IndexedSource(num_samples, source._fetch, batch_size=batch_size, ranks=DataRanks(world), seed=7)

    assert sorted(run(make, legs)) == list(range(num_samples))


@given(st.integers(1, 60), st.integers(1, 4), st.integers(0, 9))
def test_the_global_batches_are_those_of_a_run_that_was_not_stopped(num_samples, size, steps):
    x = np.arange(num_samples)[:, None]

    def make(world, batch_size):
        source = as_source((x,), batch_size=batch_size, world=SoloWorld(), seed=7)
        return IndexedSource(num_samples, source._fetch, batch_size=batch_size, ranks=DataRanks(world), seed=7)

    straight = run(make, [(1, 4 * size, 0)])
    resumed = run(make, [(size, 4, steps), (1, 4 * size, 0)])
    for first in range(0, num_samples, 4 * size):
        batch = slice(first, first + 4 * size)
        assert sorted(straight[batch]) == sorted(resumed[batch])


def test_going_on_fetches_nothing_of_what_is_done():
    fetched = []

    def fetch(rows):
        fetched.extend(rows.tolist())
        return rows[:, None], None, None

    source = IndexedSource(10**9, fetch, batch_size=4, ranks=DataRanks(FakeWorld(1, 2)), seed=0)
    next(source.epoch(0, shuffle=True, after=Consumed(samples=10**9 - 16)))
    assert len(fetched) == 4


def test_an_epoch_that_is_done_has_no_steps_left():
    source = as_source((np.arange(10),), batch_size=4, world=SoloWorld())
    assert list(source.epoch(0, shuffle=True, after=Consumed(samples=10))) == []


def test_steps_without_samples_count_as_batches_that_are_done():
    batches = [np.zeros((n, 1)) for n in (2, 0, 3)]
    source = IteratedSource(lambda epoch, shuffle, after: iter(batches[after.batches :]), ranks=DataRanks(SoloWorld()))
    assert [batch.done for batch in source.epoch(0, shuffle=False)] == [1, 3]
    (rest,) = source.epoch(0, shuffle=False, after=Consumed(2, 1))
    assert (rest.local_count, rest.done) == (3, 3)


def test_shards_of_ranks_that_are_gone_are_not_sharded_again():
    data = Sharded((np.arange(10)[:, None],))
    source = as_source(data, batch_size=2, world=SoloWorld())
    assert [int(v) for b in source.epoch(0, shuffle=False, after=Consumed(4, 2, 1)) for v in b.inputs[:, 0]] == [
        4, 5, 6, 7, 8, 9,
    ]  # fmt: skip
    with pytest.raises(HvdTrainError, match=r"checkpoint of 3 ranks.*on 1 rank\."):
        list(source.epoch(0, shuffle=False, after=Consumed(12, 6, 3)))
