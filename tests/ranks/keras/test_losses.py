"""A loss of any kind trains and is reported as in one process, or is refused on every rank."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
from keras import ops
from keras_jit import JIT

import hvdtrain
from hvdtrain.data import sharding
from hvdtrain.distributed import world
from hvdtrain.keras.losses import check_losses
from hvdtrain.keras.training_state import seed_states

pytestmark = pytest.mark.world_size(2, 3)

L = keras.losses
SAMPLES, BATCH = 22, 12  # of all ranks; the second step is uneven
NEITHER = r"means over samples, or all of them sums"


class Adds(keras.layers.Layer):
    def __init__(self, loss):
        super().__init__(name="adds")
        self.loss = loss

    def call(self, x):
        self.add_loss(self.loss(x))
        return x


def mse(a, b):
    return ops.mean((a - b) ** 2, -1)


MEANS = [
    *(name for name in dir(L) if isinstance(getattr(L, name), type) and name not in ("Loss", "CTC", "Circle")),
    lambda a, b: ops.mean((a - b) ** 2),
    mse,
]
INTEGER = ("SparseCategoricalCrossentropy", "CategoricalGeneralizedCrossEntropy")


def data(classes):
    generator = np.random.default_rng(0)
    x, labels = generator.normal(size=(SAMPLES, 5)).astype(np.float32), generator.integers(0, 3, SAMPLES)
    return x, labels if classes else np.eye(3, dtype=np.float32)[labels]


def model(adds=None, activation="softmax", **dense):
    net = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, activation="tanh", **dense)])
    if adds is not None:
        net.add(Adds(adds))
    net.add(keras.layers.Dense(3, activation=activation))
    generator = np.random.default_rng(1)
    net.set_weights([generator.normal(size=w.shape).astype(np.float32) * 0.3 for w in net.get_weights()])
    return net


def compiled(net, loss):
    eagerly = keras.backend.backend() == "tensorflow"  # whose tracing takes most of a test's time
    net.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss=loss, run_eagerly=eagerly, jit_compile=JIT)
    return net


def train(net, loss, samples, accumulate=1):
    trainer = hvdtrain.Trainer(compiled(net, loss), accumulate=accumulate)
    batch = BATCH // world.current().size // accumulate
    return trainer.fit(samples, validation=samples, epochs=1, batch_size=batch, progress=False, run_dir=None)


def alone(net, loss, samples):
    """Train as one process; return the loss in training, and in validation."""
    compiled(net, loss)
    order = sharding.epoch_order(SAMPLES, epoch=0)
    sums = [[], []]
    for first in range(0, SAMPLES, BATCH):
        rows = order[first : first + BATCH]
        sums[0].append(net.train_on_batch(*(part[rows] for part in samples)) * len(rows))
    for first in range(0, SAMPLES, BATCH):
        rows = np.arange(SAMPLES)[first : first + BATCH]
        sums[1].append(net.test_on_batch(*(part[rows] for part in samples)) * len(rows))
    return [float(sum(each)) / SAMPLES for each in sums]


def check(make, loss, samples):
    together, reference = make(), make()
    history = train(together, loss, samples)
    found = history["loss"][0], history["val_loss"][0]
    np.testing.assert_allclose(found, alone(reference, loss, samples), rtol=1e-5)
    for mine, theirs in zip(together.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.timeout(300)  # JAX compiles each of these losses, four times
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_each_loss_of_keras_equals_one_process(reduction):
    for each in MEANS:
        classes = each in INTEGER
        options = {"axis": -1} if each in ("Dice", "Tversky") else {}
        loss = getattr(L, each)(reduction=reduction, **options) if isinstance(each, str) else each
        check(model, loss, data(classes))


@pytest.mark.every_backend
def test_what_layers_add_to_a_loss_equals_one_process():
    options = {"kernel_regularizer": "l2", "activity_regularizer": "l2"}
    check(lambda: model(lambda x: ops.mean(x**2), **options), "mse", data(classes=False))


def test_what_a_layer_adds_to_a_loss_equals_one_process_or_is_refused():
    samples = data(classes=False)
    check(lambda: model(lambda x: ops.mean(x**2)), "mse", samples)
    check(lambda: model(lambda x: ops.sum(x**2)), lambda a, b: ops.sum((a - b) ** 2), samples)
    check(lambda: model(kernel_regularizer="l2", activity_regularizer="l2"), "mse", samples)
    total = L.MeanSquaredError(reduction="sum")
    for loss, options, named in [
        ("mse", {"adds": lambda x: ops.sum(x**2)}, "sums: add_loss 0 .* of layer adds"),
        ("mse", {"adds": lambda x: ops.sqrt(ops.mean(x**2))}, "add_loss 0 .* of layer adds, which is neither"),
        (total, {"adds": lambda x: ops.mean(x**2)}, "means, .*: add_loss 0 .* of layer adds"),
        (total, {"activity_regularizer": "l2"}, "means, .*activity_regularizer of layer dense"),
    ]:
        with pytest.raises(ValueError, match=f"{NEITHER}.*{named}"):
            train(model(**options), loss, samples)


class AddsInTraining(Adds):
    """Adds a loss in training alone, of outputs with noise of this size."""

    def __init__(self, loss, noise=0.0):
        super().__init__(loss)
        self.noise, self.seeds = noise, keras.random.SeedGenerator(0)

    def call(self, x, training=False):
        if training:
            self.add_loss(self.loss(x + self.noise * keras.random.normal(ops.shape(x), seed=self.seeds)))
        return x


def with_layer(layer):
    net = model()
    return keras.Sequential([keras.Input((5,)), net.layers[0], layer, net.layers[1]])


def test_what_a_layer_adds_in_training_alone_equals_one_process_or_is_refused():
    samples = data(classes=False)
    check(lambda: with_layer(AddsInTraining(lambda x: ops.mean(x**2))), "mse", samples)
    train(with_layer(AddsInTraining(lambda x: ops.mean(x**2), noise=0.1)), "mse", samples)
    train(
        keras.Sequential([*model().layers, keras.layers.BatchNormalization(), AddsInTraining(ops.mean)]), "mse", samples
    )
    for add, noise, named in [
        (ops.std, 0.0, "which is neither"),
        (ops.std, 1e-3, "which is neither"),
        (ops.sum, 0.0, "means, or the same for any samples: loss 0"),
    ]:
        with pytest.raises(ValueError, match=f"{NEITHER}.*layer adds.*{named}"):
            train(with_layer(AddsInTraining(lambda x, add=add: add(x**2), noise)), "mse", samples)


def test_a_loss_that_divides_by_class_weights_is_refused():
    class Divides(keras.losses.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            each = mse(ops.convert_to_tensor(y_true), y_pred)
            weights = ops.ones_like(each) if sample_weight is None else ops.cast(sample_weight, each.dtype)
            return ops.sum(each * weights) / ops.sum(weights)

    samples = data(classes=False)
    check(model, Divides(), samples)
    trainer = hvdtrain.Trainer(compiled(model(), Divides()))
    with pytest.raises(ValueError, match=rf"{NEITHER}.*loss 0 .*neither"):
        trainer.fit(samples, epochs=1, batch_size=4, class_weight={0: 1.0, 1: 5.0, 2: 0.2}, progress=False)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_loss_that_couples_samples_is_refused(batch):
    samples = data(classes=False)
    losses = [L.Dice(), L.Tversky(), lambda a, b: ops.sqrt(ops.mean((a - b) ** 2))]
    for loss in losses:
        trainer = hvdtrain.Trainer(compiled(model(activation="sigmoid"), loss))
        with pytest.raises(ValueError, match=rf"{NEITHER}.*loss 0 .*neither: on rank 0"):
            trainer.evaluate(samples, batch_size=batch)
    with pytest.raises(ValueError, match=rf"{NEITHER}.*circle"):
        train(model(), L.Circle(), data(classes=True))


def test_the_test_of_a_loss_changes_neither_weights_nor_random_states():
    class Noisy(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.noise = keras.random.SeedGenerator(1)  # JAX takes no other

        def call(self, x):
            self.add_loss(ops.mean(keras.random.normal(ops.shape(x), seed=self.noise) * x))
            return x + random.random()

    x, y = data(classes=False)
    net = keras.Sequential([keras.Input((5,)), Noisy(), keras.layers.BatchNormalization(), keras.layers.Dense(3)])
    compiled(net, "mse")._symbolic_build(data_batch=(x, y))
    keras.random.normal((1,))  # makes Keras's global generator

    def state():
        return random.getstate(), [ops.convert_to_numpy(v).tolist() for v in [*net.variables, *seed_states(net)]]

    before = state()
    assert check_losses(net, (x, y, None), SAMPLES, world.current(), sums=False) is False
    assert state() == before
