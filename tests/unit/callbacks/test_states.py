"""Callbacks' states in checkpoints and back: numbers as JSON, weights as arrays."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvdtrain.callbacks.base import with_arrays, without_arrays
from hvdtrain.callbacks.keras_style import KerasStyle


class BestWeights:
    """A Keras callback as far as its attributes go."""

    def __init__(self) -> None:
        self.best = 0.0
        self.patience = 3
        self.best_weights = None

    def learn(self) -> None:
        self.best = np.float32(0.5)
        self.best_weights = [np.full(2, index) for index in range(12)]  # "10" sorts before "2"


def test_a_callbacks_arrays_leave_json_behind_and_come_back():
    states = [["One", {"epoch": 3, "weights": np.arange(3)}], ["Two", {"wait": 1}]]
    plain, arrays = without_arrays(states)
    assert json.loads(json.dumps(plain)) == [["One", {"epoch": 3}], ["Two", {"wait": 1}]]
    (name, state), second = with_arrays(plain, arrays)
    assert name == "One"
    assert state["epoch"] == 3
    np.testing.assert_array_equal(state["weights"], np.arange(3))
    assert second == states[1]


def test_a_keras_callback_goes_on_with_the_weights_that_it_kept():
    before = KerasStyle(callback := BestWeights())
    callback.learn()
    plain, arrays = without_arrays([["BestWeights", before.state()]])
    after = KerasStyle(fresh := BestWeights())
    after.load_state(with_arrays(json.loads(json.dumps(plain)), dict(sorted(arrays.items())))[0][1])
    assert fresh.best == 0.5
    assert len(fresh.best_weights) == 12
    for index, array in enumerate(fresh.best_weights):
        np.testing.assert_array_equal(array, np.full(2, index))


class Unhashable(BestWeights):
    __hash__ = None


class WithoutWeakReferences:
    __slots__ = ("__dict__",)


def test_a_keras_callback_wrapped_again_still_has_all_that_training_changed():
    callback = BestWeights()
    KerasStyle(callback)
    callback.learn()
    state = KerasStyle(callback).state()  # as an elastic round and another fit do
    assert state["best"] == 0.5
    assert len([name for name in state if name.startswith("best_weights.")]) == 12
    assert "patience" not in state
    assert KerasStyle(BestWeights()).state() == {}


@pytest.mark.parametrize("kind", [Unhashable, WithoutWeakReferences])
def test_a_keras_callback_that_cannot_be_remembered_has_a_state_all_the_same(kind):
    wrapper = KerasStyle(callback := kind())
    callback.wait = 1
    assert wrapper.state() == {"wait": 1}


def test_arrays_that_the_user_gave_a_keras_callback_stay_the_users():
    callback = BestWeights()
    callback.validation_data = [np.zeros(3), np.ones(3)]
    callback.initial_weights = [np.zeros(2)]
    callback.tops = [np.zeros(2)]
    KerasStyle(callback)
    callback.initial_weights = [np.ones(2)]
    callback.tops.append(np.ones(2))
    state = KerasStyle(callback).state()
    assert set(state) == {"initial_weights.0", "tops.0", "tops.1"}
    again = BestWeights()
    again.validation_data = given = [np.full(3, 7.0)]
    again.initial_weights = [np.zeros(2)]
    KerasStyle(again).load_state(state)
    assert again.validation_data is given
    np.testing.assert_array_equal(again.initial_weights, [np.ones(2)])


def test_a_keras_callbacks_arrays_without_numbers_are_not_kept():
    wrapper = KerasStyle(callback := BestWeights())
    callback.labels = [np.array(["cat", "dog"])]
    callback.anything = [np.array([None, {}], object)]
    callback.mixed = [np.zeros(2), np.array(["cat"])]
    assert wrapper.state() == {}
