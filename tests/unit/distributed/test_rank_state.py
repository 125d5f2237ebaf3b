"""The state of each rank: saved for each, and divided where the number of ranks has changed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hvdtrain.distributed import rank_state
from hvdtrain.distributed.world import SoloWorld


def test_random_generators_resume_where_they_were():
    random.gauss(0, 1)  # leaves a second value behind
    np.random.normal()  # noqa: NPY002 - likewise
    states = rank_state.random_states()
    drawn = [random.gauss(0, 1), random.random(), *np.random.normal(size=700)]  # noqa: NPY002
    rank_state.set_random_states(states)
    assert drawn == [random.gauss(0, 1), random.random(), *np.random.normal(size=700)]  # noqa: NPY002


def test_generators_that_are_not_saved_are_left_alone():
    random.seed(1)
    expected = random.getstate()
    rank_state.set_random_states({})
    assert random.getstate() == expected


BEFORE = [
    {"random.x": np.array([r]), "sum.x": np.array([r + 1.0]), "mean.x": np.array([2.0 * r]), "max.x": np.array([r])}
    for r in range(3)
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_ranks_held_together_is_neither_lost_nor_doubled(size):
    after = [rank_state.combine(BEFORE, rank=rank, size=size) for rank in range(size)]
    assert sum(each["sum.x"][0] for each in after) == 6.0
    assert [each["random.x"][0] for each in after if "random.x" in each] == list(range(min(3, size)))
    if size != 3:
        assert all(each["mean.x"] == 2.0 and each["max.x"] == 2 for each in after)
    else:
        assert after == BEFORE


@pytest.mark.parametrize("begin", ["", "begin."])
def test_a_new_rank_gets_the_datas_generators_if_they_were_equal_on_all_ranks(begin):
    equal, own = f"{begin}random.data.train.a", f"{begin}random.data.train.b"
    before = [{equal: np.array([3]), own: np.array([rank]), "random.x": np.array([3])} for rank in range(2)]
    assert rank_state.combine(before, rank=2, size=3) == {equal: np.array([3])}


def test_what_the_root_alone_holds_stays_with_it():
    before = [{"random.data.train.sampler": np.array([3]), "random.x": np.array([0])}, {"random.x": np.array([1])}]
    assert rank_state.combine(before, rank=0, size=3) == before[0]
    assert rank_state.combine(before, rank=1, size=3) == before[1]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("dtype", [np.int64, np.float32])
@pytest.mark.parametrize("rule", ["sum", "mean", "max"])
def test_arrays_without_axes_stay_arrays_on_another_number_of_ranks(rule, dtype, size):
    before = [{f"{rule}.x": np.array(value, dtype)} for value in (2, 4)]
    for rank in range(size):
        after = rank_state.combine(before, rank=rank, size=size)[f"{rule}.x"]
        assert isinstance(after, np.ndarray)
        assert (after.shape, after.dtype) == ((), dtype)
        assert after == {"sum": 0 if rank else 6, "mean": 3, "max": 4}[rule]


def test_what_is_gathered_is_scattered_again():
    mine = {"random.x": np.arange(5, dtype=np.uint8), "mean.buffer": np.ones((2, 3), np.float32)}
    kept = rank_state.gather(mine, world=SoloWorld())
    assert set(kept) == {"0/random.x", "0/mean.buffer"}
    scattered = rank_state.scatter(kept, world=SoloWorld())
    assert scattered.keys() == mine.keys()
    for name, array in mine.items():
        np.testing.assert_array_equal(scattered[name], array)
        assert scattered[name].dtype == array.dtype


def test_the_root_sends_what_it_writes_itself_to_nobody():
    class Sent(SoloWorld):
        def allgather_bytes(self, data, *, name):
            sent.append(data)
            return super().allgather_bytes(data, name=name)

    sent, table = [], np.ones(1000)
    kept = rank_state.gather({"mean.buffer": table}, world=Sent())
    assert kept["0/mean.buffer"] is table
    assert sent == [b""]


def test_nothing_saved_is_nothing_to_restore():
    assert rank_state.scatter({}, world=SoloWorld()) == {}
