"""Gradients that are sent together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.keras.reduction import small_together


def test_large_tensors_travel_alone_and_small_ones_together():
    assert small_together([10, 1000, 20, 2000], limit=100, room=1000) == [[3], [2, 0], [1]]


def test_buckets_are_no_larger_than_the_room():
    assert small_together([40, 40, 40], limit=100, room=80) == [[2, 1], [0]]


@given(st.lists(st.integers(0, 300)), st.integers(0, 200), st.integers(0, 500))
def test_every_tensor_travels_once(nbytes, limit, room):
    buckets = small_together(nbytes, limit=limit, room=room)
    assert sorted(position for bucket in buckets for position in bucket) == list(range(len(nbytes)))
    assert all(len(bucket) == 1 or sum(nbytes[i] for i in bucket) <= room for bucket in buckets)
