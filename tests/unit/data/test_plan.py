"""Which rank takes which samples of which step: each sample once, however a step is divided."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.data import sharding
from hvdtrain.data.plan import Plan

BATCH = 4


def plans(num_samples, size, **division):
    order = sharding.EpochOrder(num_samples, seed=1).at
    return [Plan(order, num_samples, batch_size=BATCH, rank=rank, size=size, **division) for rank in range(size)]


@given(n=st.integers(0, 100), start=st.integers(0, 110), shares=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_shares_divide_the_samples_that_a_step_has_with_equal_parts(n, start, shares):
    expected = sharding.epoch_order(n, seed=1)[start:].tolist()
    for division in ({}, {"shares": shares}):
        steps = list(zip(*plans(n, len(shares), start=start, **division), strict=True))
        whole = BATCH * len(shares)
        assert len(steps) == -(-len(expected) // whole)
        for number, step in enumerate(steps):
            samples = np.concatenate([part.indices for part in step]).tolist()
            assert sorted(samples) == sorted(expected[number * whole : (number + 1) * whole])
            assert {part.global_count for part in step} == {len(samples)}
            most = max(len(part.indices) for part in step)
            assert {part.largest for part in step} == {most if division else None}


def test_parts_are_computed_in_any_order():
    (plan,) = plans(50, 1)
    assert [plan[step].indices.tolist() for step in (12, 0)] == [list(plan)[step].indices.tolist() for step in (12, 0)]
