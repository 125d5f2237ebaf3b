"""What JSON alone would change comes back as it was, or is refused."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict

import numpy as np
import pytest

from hvdtrain.checkpoint.typed_json import decode, encode
from hvdtrain.errors import CheckpointError


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True], "b": {"c": "d"}},
        {1: "a", "1": "b", (2, 3): "c"},
        Counter({30: 2, 80: 1}),
        {"nested": [{"milestones": Counter([1, 1, 4])}, (1, (2, [3]))]},
        {"~type": "not one of ours"},
        {"best": float("inf"), "worst": float("-inf")},
        {},
        (),
    ],
)
def test_a_value_comes_back_with_its_types(value):
    again = decode(json.loads(json.dumps(encode(value, "state"))))
    assert again == value
    assert repr(again) == repr(value)


def test_what_json_says_by_itself_is_written_as_it_is():
    value = {"a": [1, 2.5, None, True], "b": {"c": "d"}}
    assert encode(value, "state") == value


def test_numbers_of_numpy_become_pythons():
    assert encode([np.float32(0.5), np.int64(3), np.bool_(True)], "state") == [0.5, 3, True]


@pytest.mark.parametrize("value", [object(), {1, 2}, OrderedDict(a=1), np.zeros(2), print, b"bytes"])
def test_a_value_of_another_type_is_refused_with_its_place(value):
    with pytest.raises(CheckpointError, match=r"Received: One\.state\(\)\['a'\]\[1\]\['b'\] of type "):
        encode({"a": [0, {"b": value}]}, "One.state()")
