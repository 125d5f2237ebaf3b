"""The compared parts of a sample, and values that count as close."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from hvdtrain.data.contents import compare, leaves_of, some_rows, subsets
from hvdtrain.data.generators import Generators
from hvdtrain.data.reading import as_source
from hvdtrain.distributed.world import SoloWorld


@dataclass
class Pair:
    x: np.ndarray
    label: str


def test_the_parts_of_a_sample_are_named_by_their_place():
    sample = {"ids": [1, 2, 3], "pair": Pair(np.ones(2), "cat"), "more": (None, [np.zeros(1), 2.5])}
    found = leaves_of(sample)
    assert list(found) == ["['ids']", "['pair'].x", "['pair'].label", "['more'][0]", "['more'][1][0]", "['more'][1][1]"]
    assert found["['ids']"].shown == "[1, 2, 3]"
    assert (found["['pair'].x"].kind, found["['pair'].x"].means) == ("float64 (2,)", [1.0, 1.0])


@pytest.mark.parametrize("array", [np.arange(300, dtype=np.uint8).reshape(10, 30), np.arange(4), np.array("text")])
def test_what_all_hosts_decode_alike_has_no_means(array):
    assert leaves_of(array)[""].means is None


def test_color_images_and_complex_values_have_means():
    assert leaves_of(np.full((8, 8, 3), 7, np.uint8))[""].means == [7.0] * 64
    assert leaves_of(np.array([1 + 2j]))[""].means == [1.0, 2.0]


def test_an_object_without_known_content_is_compared_by_its_type():
    assert leaves_of(object())[""].digest == ""
    texts = np.array(["a", "b"], object)
    assert leaves_of(texts)[""].digest == leaves_of(np.array(["a", "".join("b")], object))[""].digest != ""


def test_a_large_column_is_compared_at_some_rows():
    texts = np.array(["a"] * 5000, object)
    assert len(some_rows(texts)) == 1000
    assert len(some_rows(np.zeros(5000))) == 5000


def test_indices_are_equal_in_any_type():
    class Part:
        def __init__(self, indices):
            self.dataset, self.indices = [1, 2, 3], indices

        def __getitem__(self, index):
            return self.dataset[self.indices[index]]

    expected = subsets(Part([0, 2]))
    assert list(expected) == ["dataset.indices"]
    for indices in (np.array([0, 2], np.int32), (0, 2), range(0, 3, 2)):
        assert subsets(Part(indices)) == expected
    assert subsets(Part([2, 0])) != expected


def test_one_process_reads_nothing():
    class Rows:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            raise AssertionError

    source = as_source(Rows(), batch_size=1, world=SoloWorld())
    compare(source.contents, Generators({}), world=SoloWorld(), what="data", advice="")
