"""Which batches ranks take of steps that are cut: every sample once, from a record or a checkpoint too."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import numpy as np
import pytest
from fake_world import FakeWorld
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.data.assignment import Assignment
from hvdtrain.data.reading import as_source
from hvdtrain.data.sources import Consumed, IteratedSource
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.sync.cutoff import CutoffPlan, check_cutoff

BATCH, ACCUMULATE = 3, 4


def source(num_samples, rank, size, data=None):
    x = np.arange(num_samples)[:, None]
    return as_source((x,) if data is None else data, batch_size=BATCH, world=FakeWorld(rank, size))


class Run:
    """An epoch of several ranks in one process; `counts` says how many of its planned batches each contributes."""

    def __init__(self, num_samples, size, share=0.5, consumed=Consumed(), data=None):  # noqa: B008 - frozen
        self.size, self.record, self.used, self.number = size, {}, [], 0
        self.sources = [source(num_samples, rank, size, data) for rank in range(size)]
        self.ranks = [
            CutoffPlan(share, each, ranks=DataRanks(FakeWorld(rank, size)), accumulate=ACCUMULATE)
            for rank, each in enumerate(self.sources)
        ]
        for each in self.ranks:
            each.start(consumed, shares=None, record=self.record)
            each.begin(0, consumed, number=0)
        self.consumed = consumed

    def step(self, counts):
        steps = [next(each.groups, None) for each in self.ranks]
        if steps[0] is None:
            assert steps == [None] * self.size
            return False
        contributed = np.array(counts(steps[0]))
        for rank, step in enumerate(steps):
            for _ in range(contributed[rank]):
                self.used += step.read().indices.tolist()
                step.contribute()
            step.counts = contributed
        found = [asdict(each.took(step)) for each, step in zip(self.ranks, steps, strict=True)]
        assert found == [found[0]] * self.size
        self.number += 1
        assignment = json.loads(json.dumps(found[0]["assignment"]))
        self.consumed = Consumed(**{**found[0], "assignment": Assignment.from_json(assignment)})
        return True

    def finish(self, counts):
        while self.step(counts):
            assert self.number < 1000
        return self


def everything(step):
    return step.planned


def draw_counts(data):
    """Return a function: enough of the ranks contribute all of their batches, the others any number."""

    def counts(step):
        working = np.flatnonzero(step.planned)
        done = data.draw(st.permutations(working.tolist()))[: step.needed]
        return [
            int(each) if rank in done else data.draw(st.integers(0, int(each)))
            for rank, each in enumerate(step.planned)
        ]

    return counts


@settings(deadline=None)
@given(n=st.integers(1, 150), size=st.integers(2, 4), share=st.sampled_from([0.25, 0.5, 0.75]), data=st.data())
def test_every_sample_is_used_once_an_epoch_whatever_is_cut(n, size, share, data):
    run = Run(n, size, share).finish(draw_counts(data))
    assert sorted(run.used) == list(range(n))
    assert run.consumed.samples == n


@settings(deadline=None)
@given(n=st.integers(1, 150), size=st.integers(2, 3), stop=st.integers(0, 12), to=st.integers(2, 4), data=st.data())
def test_a_resumed_epoch_uses_every_sample_once_on_any_number_of_ranks(n, size, stop, to, data):
    run = Run(n, size)
    while run.number < stop and run.step(draw_counts(data)):
        pass
    resumed = Run(n, to, consumed=run.consumed if run.number else Consumed()).finish(draw_counts(data))
    assert sorted(run.used + resumed.used) == list(range(n))


@pytest.mark.parametrize("num_samples", [1, 11, 72, 100])
def test_without_a_cut_ranks_take_the_batches_of_ordinary_steps(num_samples):
    run = Run(num_samples, 3).finish(everything)
    batches = [list(source(num_samples, rank, 3).epoch(0, shuffle=True)) for rank in range(3)]
    expected = []
    for begin in range(0, len(batches[0]), ACCUMULATE):
        for rank in range(3):
            for each in batches[rank][begin : begin + ACCUMULATE]:
                expected += each.indices.tolist()
    assert run.used == expected
    assert run.record == {}
    assert run.ranks[0].describe() is None


def test_a_batch_that_was_cut_off_is_the_ranks_next_one():
    run = Run(200, 2)
    steps = [next(each.groups) for each in run.ranks]
    first = steps[1].read()
    steps[1].contribute()
    second = steps[1].read()  # read, and then cut off
    for each, step in zip(run.ranks, steps, strict=True):
        step.counts = np.array([4, 1])
        each.took(step)
    assert next(run.ranks[1].groups).read() is second is not first


def test_the_record_of_a_run_repeats_it():
    cut = iter([[4, 2, 4], [3, 4, 4], [4, 0, 4], [1, 4, 4]])
    run = Run(150, 3).finish(lambda step: np.minimum(next(cut, step.planned), step.planned))
    assert set(run.record) == {0, 1, 2, 3}
    again = Run(150, 3, share=run.record).finish(everything)
    assert (again.used, again.record) == (run.used, run.record)
    assert run.ranks[0].describe().startswith("cutoff: 4 of ")


def test_what_needs_all_ranks_waits_for_a_step_without_a_cut_but_not_for_ever():
    run, seen = Run(2000, 2), []
    for _ in range(14):
        run.step(lambda step: [4, 3])
        seen.append(run.ranks[0].was_cut)
    assert seen == [True] * 9 + [False] * 5
    run.step(everything)
    assert not run.ranks[0].was_cut
    run.step(lambda step: [4, 3])
    assert run.ranks[0].was_cut


@pytest.mark.parametrize(
    ("share", "size", "needed"), [(0.9, 10, 9), (0.9, 4, 4), (0.75, 4, 3), (0.5, 3, 2), (0.01, 3, 1), (1, 3, 3)]
)
def test_a_step_closes_when_the_share_of_the_ranks_is_done(share, size, needed):
    step = next(Run(500, size, float(share)).ranks[0].groups)
    assert step.needed == needed
    assert step.planned.tolist() == step.whole.tolist() == [ACCUMULATE] * size
    assert step.samples == ACCUMULATE * BATCH * size


def test_a_share_of_which_no_rank_is_left_out_is_a_warning(caplog):
    Run(100, 4, 0.9)
    assert "cutoff=0.9 of 4 ranks waits for all of them: no step is cut. Give at most 0.75." in caplog.text


def test_samples_of_a_loader_are_used_once_also_with_an_order_of_its_own():
    torch = pytest.importorskip("torch")

    class Order(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(np.random.permutation(60).tolist())  # noqa: NPY002 - another order each time

        def __len__(self):
            return 60

    class Shared(FakeWorld):
        drawn = []

        def broadcast(self, array, *, name=None):
            Shared.drawn += [array] if self.rank == 0 else []
            return Shared.drawn[-1]

    def of(rank):
        loader = torch.utils.data.DataLoader(range(60), batch_size=BATCH, sampler=Order())
        return as_source(loader, batch_size=BATCH, world=Shared(rank, 2))

    ranks = [CutoffPlan(0.5, of(r), ranks=DataRanks(Shared(r, 2)), accumulate=ACCUMULATE) for r in range(2)]
    for each in ranks:
        each.begin(0, Consumed(), number=0)
    used = []
    for planned in zip(*(each.groups for each in ranks), strict=True):
        counts = np.minimum([4, 1], planned[0].planned)
        for rank, step in enumerate(planned):
            for _ in range(counts[rank]):
                used += step.read().item.tolist()
                step.contribute()
            step.counts = counts
            ranks[rank].took(step)
    assert sorted(used) == list(range(60))
    assert len(Shared.drawn) == 1


def test_workers_of_a_loader_end_with_the_epoch():
    """A loader that is left alone ends its workers when it is collected, perhaps after their queues."""
    torch = pytest.importorskip("torch")
    multiprocessing = pytest.importorskip("multiprocessing")
    others = set(multiprocessing.active_children())  # of tests that ran before
    loader = torch.utils.data.DataLoader(range(60), batch_size=BATCH, num_workers=1)
    run = Run(60, 2, data=loader)
    run.finish(lambda step: np.minimum([4, 1], step.planned))
    assert sorted(run.used) == list(range(60))
    assert set(multiprocessing.active_children()) - others  # those of the last assignment
    for each in run.ranks:
        each.close()
    assert not set(multiprocessing.active_children()) - others


@pytest.mark.parametrize("given", [0, -0.5, 1.5, True, "0.9", [0.9], {0: [4, -1]}, {-1: [4, 4]}, {"a": [1]}, {0: 4}])
def test_what_is_no_cutoff_is_refused(given):
    with pytest.raises(ValueError, match=re.escape(f"Received: cutoff={given!r}")):
        check_cutoff(given)


def test_a_record_comes_back_from_json():
    assert check_cutoff(json.loads(json.dumps({7: [4, 2]}))) == {7: [4, 2]}


def test_a_record_of_another_run_is_refused():
    with pytest.raises(ValueError, match=r"of 3 ranks and at most accumulate=4 .* Received: \[4, 2\] in step 0"):
        Run(100, 3, {0: [4, 2]})
    with pytest.raises(ValueError, match=r"Received: \[4, 5\] in step 0"):
        Run(100, 2, {0: [4, 5]})
    with pytest.raises(ValueError, match=r"Received: \[4, 4\] batches in step 0, where ranks have \[1, 1\] left"):
        Run(5, 2, {0: [4, 4]}).step(everything)


def test_data_that_can_only_be_iterated_is_refused():
    batches = IteratedSource(lambda *_: iter(()), ranks=DataRanks(FakeWorld(0, 2)))
    with pytest.raises(TypeError, match="cutoff gives samples that were cut off to other ranks"):
        CutoffPlan(0.5, batches, ranks=DataRanks(FakeWorld(0, 2)), accumulate=1)
