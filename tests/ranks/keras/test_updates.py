"""Weights are updated in one pass where that can be done, by the rule that the optimizer's class has."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import hvdtrain.keras as hvd

pytestmark = pytest.mark.world_size(2)


class OwnRule(keras.optimizers.SGD):
    """Moves weights against the gradient's sign."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_sub(variable, keras.ops.sign(gradient) * learning_rate)


SIMILAR = {
    "plain sgd": (lambda: keras.optimizers.SGD(0.1), "ResourceApplyGradientDescent"),
    "momentum": (lambda: keras.optimizers.SGD(0.1, momentum=0.9), "ResourceApplyKerasMomentum"),
    "nesterov": (lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), "ResourceApplyKerasMomentum"),
    "accumulation": (
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
        "ResourceApplyKerasMomentum",
    ),
    "adam": (lambda: keras.optimizers.Adam(0.01, beta_1=0.8), "ResourceApplyAdam"),
    "adamw": (lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5), "ResourceApplyAdam"),
    "amsgrad": (lambda: keras.optimizers.Adam(0.01, amsgrad=True), None),
    "rmsprop": (lambda: keras.optimizers.RMSprop(0.01), None),
    "own rule": (lambda: OwnRule(0.01, momentum=0.9), None),
}


IN_GRAPHS = ("plain sgd", "nesterov", "accumulation", "adamw", "own rule")  # the others have the operations of these


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.in_graphs] * (name in IN_GRAPHS)) for name in SIMILAR]
)
def test_updates_are_those_of_keras_and_fused_where_tensorflow_can(kit, name):
    make, fused = SIMILAR[name]
    alone = kit.alone(kit.model(), make())
    together = kit.together(kit.model(), hvd.DistributedOptimizer(make()))
    # Near zero, Adam and its like make much of a gradient's rounding.
    kit.assert_close(together, alone, tolerance=2e-6)
    kit.assert_same_everywhere(together)
    assert np.abs(kit.flat(together) - kit.flat(kit.model())).max() > 1e-3  # it did train
    if kit.backend == "tensorflow":
        expected = {fused: len(together.trainable_variables)} if fused else {}
        assert _fused_operations(together) == expected


@pytest.mark.in_graphs
def test_slots_are_those_of_keras(kit):
    """So that plain Keras loads what was saved."""
    alone = kit.alone(kit.model(), keras.optimizers.Adam(0.01))
    together = kit.together(kit.model(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    ours, plain = together.optimizer.variables, alone.optimizer.variables
    assert [v.shape for v in ours] == [v.shape for v in plain]
    np.testing.assert_allclose(kit.flat(ours), kit.flat(plain), atol=1e-6)


def _fused_operations(model: Any) -> dict[str, int]:
    """Return how many of TensorFlow's own update operations a step of `model` holds, by their type."""
    import tensorflow as tf

    x, y = np.zeros((4, 5), "float32"), np.zeros((4, 3), "float32")
    graph = tf.function(model.train_step).get_concrete_function((x, y)).graph
    functions = [graph, *(graph._get_function(name).graph for name in graph._functions)]
    found: dict[str, int] = {}
    for operation in (o for g in functions for o in g.get_operations()):
        if operation.type.startswith("ResourceApply"):
            found[operation.type] = found.get(operation.type, 0) + 1
    return found
