"""A sampler's changes in itself are saved and restored; attributes that it does not change are the script's."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest

from hvdtrain.data.attributes import Attributes
from hvdtrain.data.generators import Generators


class Sampler:
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __iter__(self):
        return iter(())


VALUES = {
    "number": (1, 2),
    "bool": (False, True),
    "text": ("a", "b"),
    "nothing": (None, 3),
    "list": ([1, 2, 3], [3, 1, 2]),
    "batches": ([[1, 2], [3]], [[3], [2, 1]]),
    "tuples": ([(1, "a"), (2, "b")], [(2, "b"), (1, "a")]),
    "by length": ({3: [1, 2], 5: [0]}, {3: [2, 1], 5: [0]}),
    "numpy's number": (np.int64(1), np.int64(2)),
    "infinity": (0.0, float("inf")),
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_changed_attribute_is_restored(kind):
    before, after = VALUES[kind]
    sampler, other = Sampler(value=deepcopy(before)), Sampler(value=deepcopy(before))
    saved = Attributes(sampler, only_scalars=False)
    first = saved.state()
    sampler.value = deepcopy(after)
    changed = saved.state()
    Attributes(other, only_scalars=False).set_state(changed)
    assert other.value == after
    assert type(other.value) is type(after)
    assert first == {}
    saved.set_state(first)
    assert sampler.value == before


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.bool_])
def test_lists_and_arrays_change_in_place(dtype):
    array, items = np.arange(4).astype(dtype), [1, 2]
    sampler = Sampler(array=array, items=items)
    saved = Attributes(sampler, only_scalars=False)
    array[:2], items[:] = array[2:], [2, 1, 0]
    changed, expected = saved.state(), array.copy()
    saved.set_state({})
    assert (array.tolist(), items) == (np.arange(4).astype(dtype).tolist(), [1, 2])
    saved.set_state(changed)
    np.testing.assert_array_equal(array, expected)
    assert items == [2, 1, 0]
    assert sampler.array is array
    assert sampler.items is items


def test_what_has_not_changed_is_left_to_the_script():
    first = Sampler(batch_size=4, epoch=0, dataset=object())
    saved = Attributes(first, only_scalars=False)
    first.epoch, first.dataset = 3, object()
    second = Sampler(batch_size=8, epoch=0, dataset="other")
    Attributes(second, only_scalars=False).set_state(saved.state())
    assert vars(second) == {"batch_size": 8, "epoch": 3, "dataset": "other"}


def test_an_object_that_is_seen_again_has_changed_since_the_first_time():
    sampler = Sampler(epoch=0)
    Attributes(sampler, only_scalars=False)
    sampler.epoch = 2
    assert Attributes(sampler, only_scalars=False).state() == {"epoch": "2"}


def test_of_a_stream_only_numbers_and_texts_are_saved():
    stream = Sampler(epoch=0, rows=[1, 2])
    saved = Attributes(stream, only_scalars=True)
    stream.epoch, stream.rows = 1, [2, 1]
    assert saved.state() == {"epoch": "1"}


def test_only_the_rank_whose_order_counts_saves_it():
    sampler, stream = Sampler(epoch=0), Sampler(epoch=0)
    roots = {"sampler": sampler, "dataset": stream}
    shared = Generators(roots, changing=roots.keys(), is_order_shared=True)
    own = Generators(roots, changing=roots.keys())
    sampler.epoch = stream.epoch = 1
    assert list(shared.states()) == ["dataset"]
    assert sorted(own.states()) == ["dataset", "sampler"]
    own.set_states({})
    assert sampler.epoch == stream.epoch == 0
