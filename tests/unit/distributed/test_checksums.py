"""A digest must find the changes that a fault makes, wherever they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.distributed import checksums

BLOCK = 512 * 511  # words of a block
# Bytes on both sides of what the code tells apart: whole words, small arrays, rows of lanes, blocks.
SIZES = st.one_of(
    st.integers(1, 40),
    st.integers(8 * 2048 - 9, 8 * 2048 + 9),
    st.integers(8 * 2048, 8 * 6000),
    st.integers(8 * BLOCK - 4100, 8 * BLOCK + 4100),
    st.integers(8 * BLOCK, 24 * BLOCK),
)
many = settings(max_examples=150)


def numbers(size):
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


@many
@given(size=SIZES, data=st.data())
def test_any_flipped_bit_changes_the_digest(size, data):
    array = numbers(size)
    before = checksums.of_array(array)
    array[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksums.of_array(array) != before


@many
@given(size=SIZES, data=st.data())
def test_two_flips_never_cancel(size, data):
    words = numbers(size // 8 * 8 + 16).view(np.uint64)
    before = checksums.of_array(words)
    places = data.draw(st.lists(st.integers(0, words.size - 1), min_size=2, max_size=2, unique=True))
    words[places] ^= np.uint64(1 << data.draw(st.integers(0, 63)))
    assert checksums.of_array(words) != before


@pytest.mark.parametrize("lanes", [512, 511])
@pytest.mark.parametrize("apart", [1, 7, 300])
def test_two_signs_of_a_lane_that_flip_are_found(lanes, apart):
    """In a plain sum of lanes their top bits would cancel."""
    array = np.random.default_rng(0).normal(size=2 * BLOCK)
    before = checksums.of_array(array)
    array[[3, 3 + lanes * apart]] *= -1
    assert checksums.of_array(array) != before


@many
@given(size=st.sampled_from([2, 700, 5000, 2 * BLOCK - 7, 3 * BLOCK]), data=st.data())
def test_two_elements_that_are_swapped_change_the_digest(size, data):
    array = np.random.default_rng(size).permutation(size).astype(np.float32)  # no two are equal
    before = checksums.of_array(array)
    # Often in one lane, where a plain sum of lanes would not see it.
    first = data.draw(st.integers(0, size - 1))
    second = data.draw(
        st.one_of(st.integers(0, size - 1), st.integers(0, 600).map(lambda i: (first + 1024 * i) % size))
    )
    array[[first, second]] = array[[second, first]]
    assert (checksums.of_array(array) != before) == (first != second)


@pytest.mark.parametrize("row", [512, 511, 64])
@pytest.mark.parametrize("rows", [8, 300, 1200])
def test_permuted_rows_change_the_digest(row, rows):
    array = np.random.default_rng(0).normal(size=(rows, row))
    before = checksums.of_array(array)
    generator = np.random.default_rng(1)
    for _ in range(20):
        assert checksums.of_array(array[generator.permutation(rows)]) != before
    array[[0, rows - 1]] = array[[rows - 1, 0]]
    assert checksums.of_array(array) != before


def test_shape_and_dtype_count():
    array = np.zeros((4, 6), np.float32)
    others = [array.reshape(6, 4), array.reshape(-1), array.view(np.int32), array.astype(np.float64), array[:3]]
    digests = {checksums.of_array(each) for each in [array, *others]}
    assert len(digests) == 6
    assert checksums.of_array(np.zeros(1)) != checksums.of_array(np.zeros(()))


def test_bits_count_and_not_numbers():
    assert checksums.of_array(np.array([0.0])) != checksums.of_array(np.array([-0.0]))
    nan = np.array([np.nan])
    assert checksums.of_array(nan) == checksums.of_array(nan.copy())


@pytest.mark.parametrize("size", [0, 5, 3000, BLOCK + 5])
def test_the_way_an_array_lies_in_memory_does_not_count(size):
    array = np.random.default_rng(0).normal(size=(size, 3))
    expected = checksums.of_array(array)
    assert checksums.of_array(np.asfortranarray(array)) == expected
    odd = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)  # not aligned
    odd[:] = array
    assert checksums.of_array(odd) == expected
    strided = np.zeros((size, 6))[:, ::2]
    strided[:] = array
    strided.flags.writeable = False
    assert checksums.of_array(strided) == expected


def test_the_sum_wraps_around_without_a_warning(recwarn):
    checksums.of_array(np.full(3 * BLOCK, 2**64 - 1, np.uint64))
    assert not recwarn


def test_settings_differ_and_unique_objects_do_not():
    assert checksums.of_json({"lr": 0.1}) != checksums.of_json({"lr": 0.2})
    assert checksums.of_json({"a": 1, "b": 2}) == checksums.of_json({"b": 2, "a": 1})
    assert checksums.of_json({"hook": object()}) == checksums.of_json({"hook": object()})


def test_names_and_order_count_in_the_digest_of_many():
    a, b = checksums.of_json(1), checksums.of_json(2)
    assert checksums.combined({"a": a, "b": b}) != checksums.combined({"b": b, "a": a})
    assert checksums.combined({"a": a, "b": b}) != checksums.combined({"a": b, "b": a})
    assert len(checksums.combined({})) == checksums.SIZE
