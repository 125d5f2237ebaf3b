"""The samples that each rank has left of an epoch: every sample once, however often the rest is assigned again."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.data import sharding
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.plan import Plan

BATCH = 3


def identity(positions):
    return positions


def parts(assignment, num_samples, rank, order=identity):
    """Return what a rank has left."""
    return Plan(order, num_samples, batch_size=BATCH, rank=rank, size=assignment.size, assignment=assignment)


def read(assignment, num_samples, rank):
    """Return the samples that a rank has left."""
    return [sample for part in parts(assignment, num_samples, rank) for sample in part.indices.tolist()]


@given(n=st.integers(1, 200), size=st.integers(1, 5), start=st.integers(0, 20))
def test_a_new_assignment_gives_ranks_the_shards_of_an_epoch(n, size, start):
    assignment = Assignment((0,) * size, start=min(start, n))
    for rank in range(size):
        expected = sharding.shard(n, rank=rank, size=size, shuffle=False, start=min(start, n))[:].tolist()
        assert read(assignment, n, rank) == expected
        assert assignment.remaining(n)[rank] == len(expected)


@given(n=st.integers(1, 200), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), data=st.data())
def test_every_sample_is_taken_once_however_often_the_rest_is_assigned(n, sizes, data):
    assignment, taken = Assignment((0,) * sizes[0]), []
    for size in [*sizes[1:], 1]:
        counts = [data.draw(st.integers(0, int(left))) for left in assignment.remaining(n)]
        for rank, count in enumerate(counts):
            taken += read(assignment, n, rank)[:count]
        assignment = assignment.take(counts).reassign(n, size=size)
        assert assignment == Assignment.from_json(json.loads(json.dumps(asdict(assignment))))
    taken += read(assignment, n, 0)
    assert sorted(taken) == list(range(n))


def test_what_was_left_over_comes_first_and_the_rest_is_not_listed():
    assignment = Assignment((6, 2, 6)).reassign(100, size=3)  # rank 1 is behind by 4 of its samples, 1 + 3 * k
    assert assignment == Assignment((0, 0, 0), start=18, left=(7, 10, 13, 16))
    assert read(assignment, 100, 0)[:3] == [7, 16, 20]


def test_the_position_of_a_part_is_that_of_its_first_sample():
    order = np.random.default_rng(0).permutation(20)
    found = list(parts(Assignment((3, 0), left=(1, 2), start=4), 20, 0, order.__getitem__))
    assert [order[part.position] for part in found] == [part.indices[0] for part in found]


@pytest.mark.parametrize("left", [(), (0, 2)])
def test_places_become_positions_in_any_number_at_once(left):
    assignment = Assignment((0,), start=5, left=left)
    expected = [*left, *range(5, 8)]
    assert assignment.positions(np.arange(len(expected))).tolist() == expected
    assert assignment.positions(np.zeros(0, np.int64)).tolist() == []
