"""What callbacks hold goes into a checkpoint and comes back: numbers as JSON, weights as arrays."""

from __future__ import annotations

import json

import numpy as np

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
