"""`sync=Delayed()` on Keras in one process: the first step, the last one, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")

import hvdtrain  # noqa: E402
from hvdtrain.callbacks import Callback  # noqa: E402

pytestmark = pytest.mark.usefixtures("alone")

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def model(**options):
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, **options), keras.layers.Dense(3)])


def trainer(net, optimizer=None, **options):
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1)
    return hvdtrain.Trainer(net, optimizer=optimizer, loss="mse", sync=hvdtrain.Delayed(), **options)


class Notes(Callback):
    """Notes the weights and the optimizer's variables after each step."""

    def __init__(self, net, *, freeze_after=None):
        self.net, self.freeze_after, self.weights, self.others = net, freeze_after, [], []

    def on_step_end(self, trainer, step):
        self.weights.append(self.net.get_weights())
        variables = self.net.optimizer.variables
        self.others.append([np.array(keras.ops.convert_to_numpy(v)) for v in variables])
        if step + 1 == self.freeze_after:
            self.net.layers[0].trainable = False
            self.net.train_function = None


def fit(net, run, notes=()):
    run.fit((X, X[:, :3]), epochs=1, batch_size=2, callbacks=notes, progress=False, run_dir=None)


def same(ours, theirs):
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "bf16"}], ids=str)
def test_the_first_step_changes_nothing_and_the_last_gradient_is_applied_at_the_end(options):
    net = model()
    run, notes = trainer(net, **options), Notes(net)
    before = net.get_weights()
    started = [np.array(keras.ops.convert_to_numpy(v)) for v in net.optimizer.variables]
    fit(net, run, [notes])
    assert same(notes.weights[0], before)
    assert same(notes.others[0], started), "momentum, and the count of iterations"
    assert not same(notes.weights[1], before)
    assert not same(net.get_weights(), notes.weights[-1])
    assert int(keras.ops.convert_to_numpy(net.optimizer.iterations)) == len(notes.weights)
    assert not any(name.startswith("sync.") for name in run.state().arrays)


@pytest.mark.skipif(
    keras.backend.backend() == "jax", reason="Keras's optimizer on JAX trains all that it was built over"
)
def test_a_layer_that_is_frozen_does_not_move_by_a_gradient_of_before():
    net = model()
    notes = Notes(net, freeze_after=2)
    fit(net, trainer(net), [notes])
    frozen, _, trained, _ = notes.weights[1]
    assert np.array_equal(net.get_weights()[0], frozen)
    assert not np.array_equal(net.get_weights()[2], trained)


@pytest.mark.parametrize(
    ("net", "optimizer", "options", "message"),
    [
        ({}, None, {"precision": "fp16"}, "loss scaling: in each step all ranks agree .* use precision=.bf16"),
        ({"dtype": "mixed_float16"}, None, {}, "loss scaling: "),
        ({}, None, {"nan_policy": "skip"}, "nan_policy='skip': ranks would learn of"),
        ({}, {"use_ema": True}, {}, r"SGD\(use_ema=True\): .* leave it out"),
    ],
)
def test_what_cannot_be_delayed_is_refused_before_the_model_is_changed(net, optimizer, options, message):
    net = model(**net)
    optimizer = keras.optimizers.SGD(0.1, **(optimizer or {}))
    with pytest.raises(ValueError, match=f"With sync=Delayed, no step waits for other ranks. Received: {message}"):
        trainer(net, optimizer, **options)
    assert not net.compiled


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX has one optimizer")
def test_several_optimizers_are_refused():
    class Two(keras.Model):
        def compile(self, **options):
            super().compile(**options)
            self.other = keras.optimizers.SGD(0.1)
            self.other.build(self.trainable_variables)

    inputs = keras.Input((4,))
    net = Two(inputs, keras.layers.Dense(3)(inputs))
    net.compile(optimizer="sgd", loss="mse")
    with pytest.raises(ValueError, match="the optimizers optimizer and other: each would be a step late"):
        hvdtrain.Trainer(net, sync=hvdtrain.Delayed())
