"""Which rank has which place in a grid; arithmetic alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.torch.grid.layout import AXES, Layout

lengths = st.integers(1, 3)


@given(replicas=lengths, stages=lengths, shard=lengths, tensor=lengths)
def test_each_rank_has_one_place_and_one_group_along_each_axis(replicas, stages, shard, tensor):
    size = replicas * stages * shard * tensor
    layout = Layout.of(["a"] * size, stages=stages, shard=shard, tensor=tensor)
    assert [layout.length(axis) for axis in AXES] == [replicas, stages, shard, tensor]
    places = [tuple(layout.place(rank).values()) for rank in range(size)]
    assert sorted(places) == sorted(np.ndindex(replicas, stages, shard, tensor))
    for axis in AXES:
        groups = layout.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(size))
        for group in groups:
            assert [layout.place(rank)[axis] for rank in group] == list(range(layout.length(axis)))
            assert layout.group(group[-1], axis) == group


def test_ranks_that_exchange_most_are_neighbours():
    layout = Layout.of(["a"] * 8, stages=2, tensor=2)
    assert [layout.group(0, axis) for axis in AXES] == [(0, 4), (0, 2), (0,), (0, 1)]
    assert layout.group(5, "replica", "shard") == (1, 5)


def test_ranks_of_one_host_are_placed_together_however_the_launcher_numbered_them():
    layout = Layout.of(["a", "b"] * 4, stages=4)
    assert layout.groups("stage") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert layout.split == ()


@pytest.mark.parametrize(
    ("hosts", "stages", "split"),
    [
        ("aaabbb", 2, (1,)),  # three ranks a host, of which two fit
        ("aabb", 4, ()),  # no host has room for a replica
        ("aaaabb", 3, (1,)),
        ("aabb", 2, ()),
    ],
)
def test_a_replica_on_several_hosts_is_known_where_one_had_room_for_it(hosts, stages, split):
    assert Layout.of(list(hosts), stages=stages).split == split


@pytest.mark.parametrize(
    ("size", "lengths", "said"),
    [
        (6, {"stages": 2, "shard": 2}, "A replica of stages=2 x shard=2 needs 4 ranks, and 6 .* Launch 4 or 8 ranks"),
        (2, {"tensor": 4}, "needs 4 ranks, and 2 ranks cannot be divided into such replicas. Launch 4 ranks"),
        (4, {"stages": 0}, "stages must be a whole number of ranks, at least 1. Received: stages=0"),
        (4, {"shard": 2.0}, "Received: shard=2.0"),
    ],
)
def test_ranks_that_make_no_whole_replicas_are_refused_with_the_numbers_that_do(size, lengths, said):
    with pytest.raises(ValueError, match=said):
        Layout.of(["a"] * size, **lengths)
