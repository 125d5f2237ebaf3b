"""Ordinary steps: which batches make one, what is done after it, and from when on other shares hold."""

from __future__ import annotations

import numpy as np
import pytest
from fake_world import FakeWorld

from hvdtrain.data.assignment import Assignment
from hvdtrain.data.reading import as_source
from hvdtrain.data.sources import Consumed, IteratedSource
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import SoloWorld
from hvdtrain.errors import CheckpointError
from hvdtrain.sync.balance import Balance
from hvdtrain.sync.steps import OrdinarySteps

BATCH = 4


def of_ranks(num_samples, *, size=2, accumulate=3, given=None):
    """Return the steps of each rank, at the beginning of a fit."""
    found = []
    for world in (FakeWorld(rank, size) for rank in range(size)):
        source = as_source((np.arange(num_samples)[:, None],), batch_size=BATCH, world=world)
        balance = None if given is None else Balance(given, source, size=size)
        found.append(OrdinarySteps(source, ranks=DataRanks(world), accumulate=accumulate, balance=balance))
        found[-1].start(Consumed(), shares=None, record={})
    return found


def samples(group):
    return np.concatenate([batch.indices for batch in group]).tolist()


def test_a_step_has_so_many_batches_and_the_last_one_what_is_left():
    ranks = of_ranks(2 * BATCH * 8)
    used, done = [], []
    for each in ranks:
        each.begin(0, Consumed(), number=0)
        lengths = []
        while group := next(each.groups, None):
            lengths.append(len(group))
            used += samples(group)
            done.append(each.took(group))
        assert lengths == [3, 3, 2]
    assert sorted(used) == list(range(2 * BATCH * 8))
    assert done == 2 * [Consumed(24, 6, 2), Consumed(48, 12, 2), Consumed(64, 16, 2)]


def test_an_epoch_continues_after_what_is_done_of_it():
    first, again = of_ranks(64)[0], of_ranks(64)[0]
    first.begin(5, Consumed(), number=0)
    consumed = first.took(next(first.groups))
    again.begin(5, consumed, number=1)
    assert samples(next(again.groups)) == samples(next(first.groups))


def test_the_rest_of_an_epoch_is_read_again_once_after_shares_change(monkeypatch):
    """A DataLoader's workers have read ahead by the shares of before."""
    used, rests = [], []
    for each in of_ranks(200, given="speed"):
        rest = each.source.rest
        monkeypatch.setattr(each.source, "rest", lambda *given, rest=rest: rests.append(given) or rest(*given))
        each.begin(3, Consumed(), number=0)
        for step, group in enumerate(iter(lambda each=each: next(each.groups), [])):
            used += samples(group)
            done = each.took(group)
            if step == 1:
                each.start(done, shares=[6, 2], record={})
            each.divide()
    assert sorted(used) == list(range(200))
    assert rests == 2 * [(3, Consumed(48, 12, 2))]


def test_equal_parts_are_not_read_again():
    steps = of_ranks(64)[0]
    steps.begin(0, Consumed(), number=0)
    groups = steps.groups
    steps.divide()
    assert steps.groups is groups


def test_an_iterator_ends_when_the_epoch_is_closed():
    ended = []

    def batches(*_):
        try:
            while True:
                yield np.zeros((BATCH, 1))
        finally:
            ended.append(True)

    ranks = DataRanks(SoloWorld())
    steps = OrdinarySteps(IteratedSource(batches, ranks=ranks), ranks=ranks, accumulate=2)
    steps.begin(0, Consumed(), number=0)
    assert len(next(steps.groups)) == 2
    assert not ended
    steps.close()
    assert ended
    assert next(steps.groups, None) is None


def test_an_epoch_of_which_ranks_have_different_samples_left_is_refused():
    with pytest.raises(CheckpointError, match=r"where ranks have different samples left\. Received: cutoff=None"):
        of_ranks(64)[0].start(Consumed(24, 6, 2, Assignment((16, 8))), shares=None, record={})
