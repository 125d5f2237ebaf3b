"""Models as users bring them: several inputs and outputs; a train_step of their own; a GAN of two optimizers."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.data import sharding
from hvdtrain.errors import DesyncError

BACKEND = keras.backend.backend()
LOCAL, SAMPLES = 4, 26  # the last step has fewer samples: on 3 ranks, one has none
LOGISTIC = keras.losses.BinaryCrossentropy(from_logits=True)


def dense(units, *, inputs, seed):
    kernel = keras.initializers.GlorotUniform(seed=seed)
    hidden = keras.layers.Dense(6, activation="tanh", kernel_initializer=kernel)
    return keras.Sequential([keras.Input((inputs,)), hidden, keras.layers.Dense(units, kernel_initializer=kernel)])


def gradients(loss_of, variables):
    """Return the gradients of `loss_of()` with respect to `variables`, as the guide for each backend does it."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_of()
        return loss, tape.gradient(loss, [v.value for v in variables])
    for variable in variables:
        variable.value.grad = None
    loss = loss_of()
    loss.backward()
    return loss, [v.value.grad for v in variables]


def apply(optimizer, grads, variables):
    if BACKEND == "torch":
        import torch

        with torch.no_grad():
            optimizer.apply(grads, variables)
    else:
        optimizer.apply(grads, variables)


class Gan(keras.Model):
    """Takes (noise, real) and trains as Keras's guide does; the noise is data, so that one process has the same."""

    def __init__(self):
        super().__init__()
        self.discriminator, self.generator = dense(1, inputs=3, seed=1), dense(3, inputs=5, seed=2)
        self.d_loss, self.g_loss = keras.metrics.Mean("d_loss"), keras.metrics.Mean("g_loss")
        self.built = True

    def compile(self, d_optimizer, g_optimizer):
        super().compile(jit_compile=False)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.d_optimizer.build(self.discriminator.trainable_variables)
        self.g_optimizer.build(self.generator.trainable_variables)

    def train_step(self, data):
        noise, real = data[:2]
        d_variables, g_variables = self.discriminator.trainable_variables, self.generator.trainable_variables

        def d_loss():
            fake = self.discriminator(self.generator(noise))
            true = self.discriminator(real)
            return LOGISTIC(keras.ops.ones_like(true), true) + LOGISTIC(keras.ops.zeros_like(fake), fake)

        def g_loss():
            fake = self.discriminator(self.generator(noise))
            return LOGISTIC(keras.ops.ones_like(fake), fake)

        loss, grads = gradients(d_loss, d_variables)
        apply(self.d_optimizer, grads, d_variables)
        self.d_loss.update_state(loss, sample_weight=keras.ops.shape(real)[0])
        loss, grads = gradients(g_loss, g_variables)
        apply(self.g_optimizer, grads, g_variables)
        self.g_loss.update_state(loss, sample_weight=keras.ops.shape(real)[0])
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


def needs_several_optimizers():
    if BACKEND == "jax":
        pytest.skip("a step on JAX has the state of one optimizer")


def gan(clip_norm=None):
    model = Gan()
    options = {"momentum": 0.9, "global_clipnorm": clip_norm}
    model.compile(keras.optimizers.SGD(0.5, **options), keras.optimizers.SGD(0.2, **options))
    return model


def data():
    generator = np.random.default_rng(0)
    return generator.normal(size=(SAMPLES, 5)).astype("float32"), generator.normal(size=(SAMPLES, 3)).astype("float32")


def train_alone(model, epochs, samples=None):
    """Take the steps of one process; return the logs of each epoch."""
    logs = []
    for epoch in range(epochs):
        order, batch = sharding.epoch_order(SAMPLES, epoch=epoch), LOCAL * hvd.size()
        model.reset_metrics()
        model.reset_metrics = lambda: None
        for begin in range(0, SAMPLES, batch):
            rows = order[begin : begin + batch]
            batch_of = keras.tree.map_structure(lambda array, rows=rows: array[rows], samples or data())
            found = model.train_on_batch(*batch_of, return_dict=True)
        del model.reset_metrics
        logs.append(found)
    return logs


def fit(trainer, **options):
    return trainer.fit(data(), **{"epochs": 2, "batch_size": LOCAL, "progress": False, "run_dir": None, **options})


@pytest.mark.every_backend
@pytest.mark.three_ranks
@pytest.mark.world_size(2, 3)
def test_a_gan_of_two_optimizers_trains_as_in_one_process(kit):
    if BACKEND == "jax":
        with pytest.raises(ValueError, match=r"one optimizer through a train_step.*d_optimizer, g_optimizer"):
            hvdtrain.Trainer(gan())
        return
    model, reference = gan(), gan(clip_norm=0.3)
    before = [v + 0 for v in model.get_weights()]
    if hvd.rank():  # which only a broadcast mends
        for variable in [*model.trainable_variables, *model.d_optimizer.variables[2:]]:
            variable.assign(variable + 1)
    trainer = hvdtrain.Trainer(model, clip_norm=0.3)
    assert all((mine == first).all() for mine, first in zip(model.get_weights(), before, strict=True))
    history = fit(trainer)
    logs = train_alone(reference, 2)
    kit.assert_close(model, reference)
    for name in ("d_optimizer", "g_optimizer"):
        kit.assert_close(getattr(model, name).variables, getattr(reference, name).variables)
        assert (
            hvd.allgather_object(kit.digest(getattr(model, name).variables)).count(
                kit.digest(getattr(model, name).variables)
            )
            == hvd.size()
        )
    kit.assert_same_everywhere(model)
    assert set(history) >= {"d_loss", "g_loss"}
    assert "loss" not in history
    for name in ("d_loss", "g_loss"):
        assert history[name] == pytest.approx([each[name] for each in logs], abs=1e-6)


@pytest.mark.world_size(2)
def test_a_gan_of_two_sharded_optimizers_trains_as_in_one_process(kit):
    needs_several_optimizers()
    model, reference = gan(), gan(clip_norm=0.3)
    if hvd.rank():  # which only a broadcast mends
        for variable in model.d_optimizer.variables[2:]:
            variable.assign(variable + 1)
    trainer = hvdtrain.Trainer(model, clip_norm=0.3, shard="optimizer")
    fit(trainer)
    train_alone(reference, 2)
    kit.assert_close(model, reference)
    held = trainer.state().copied().arrays
    for name in ("d_optimizer", "g_optimizer"):
        ours = [held[key].ravel() for key in sorted(held) if key.startswith(f"optimizer.{name}.")]
        kit.assert_close(np.concatenate(ours), getattr(reference, name).variables)


def named(values, *, by_name):
    """Return `values`, by name or in a list."""
    return values if by_name else list(values.values())


@pytest.mark.in_graphs
@pytest.mark.three_ranks
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("by_name", [True, False])
def test_several_inputs_and_outputs_train_as_in_one_process(kit, by_name):
    x, y = data()
    classes = np.arange(SAMPLES) % 3
    inputs = named({"left": x[:, :2], "right": x[:, 2:]}, by_name=by_name)
    samples = (inputs, named({"size": y, "kind": classes}, by_name=by_name))

    def model():
        sides = {"left": keras.Input((2,), name="left"), "right": keras.Input((3,), name="right")}
        both = keras.layers.Concatenate()(list(sides.values()))
        kernel = keras.initializers.GlorotUniform(seed=1)
        outputs = {name: keras.layers.Dense(3, kernel_initializer=kernel, name=name)(both) for name in ("size", "kind")}
        net = keras.Model(named(sides, by_name=by_name), named(outputs, by_name=by_name))
        losses = {"size": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
        net.compile(
            keras.optimizers.SGD(0.2, momentum=0.9),
            loss=named(losses, by_name=by_name),
            loss_weights=named({"size": 0.3, "kind": 2.0}, by_name=by_name),
            metrics=named({"size": ["mae"], "kind": ["accuracy"]}, by_name=by_name),
            jit_compile=False,
        )
        return net

    ours, reference = model(), model()
    reference.run_eagerly = True  # in a graph, Keras forgets the number of samples: see `weigh_losses_by_samples`
    trainer = hvdtrain.Trainer(ours)
    history = trainer.fit(samples, epochs=2, batch_size=LOCAL, progress=False, run_dir=None)
    logs = train_alone(reference, 2, samples)
    kit.assert_close(ours, reference)
    assert {"size_loss", "kind_loss", "size_mae", "kind_accuracy"} < set(logs[-1])
    for name in logs[0]:
        assert history[name] == pytest.approx([each[name] for each in logs], abs=1e-5), name
    expected = reference.evaluate(*samples, batch_size=SAMPLES, return_dict=True, verbose=0)
    for batch_size in (LOCAL, LOCAL + 1):  # with the second, two ranks end with batches of 3
        assert trainer.evaluate(samples, batch_size=batch_size) == pytest.approx(expected, abs=1e-5)


class StopAt(Callback):
    """Stands for a kill."""

    def __init__(self, global_step):
        self._global_step = global_step

    def on_step_begin(self, trainer, step):
        if trainer.global_step == self._global_step:
            raise InterruptedError


@pytest.mark.world_size(2)
def test_a_gan_resumes_with_both_optimizers(kit, shared_tmp_path):
    needs_several_optimizers()
    straight = hvdtrain.Trainer(gan())
    fit(straight)
    with pytest.raises(InterruptedError):
        fit(hvdtrain.Trainer(gan()), callbacks=[Checkpoint(shared_tmp_path, every_steps=1), StopAt(5)])
    resumed = hvdtrain.Trainer(gan())
    history = fit(resumed, callbacks=[Checkpoint(shared_tmp_path, every_steps=1)])
    ours, theirs = resumed.state().arrays, straight.state().arrays
    assert ours.keys() == theirs.keys()
    assert {name.split(".")[1] for name in ours if name.startswith("optimizer.")} > {"d_optimizer", "g_optimizer"}
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    assert history["d_loss"] == straight.history["d_loss"]


class OneOptimizer(keras.Model):
    """Calls its optimizers as `steps` says: a list of (a function that returns the optimizer, its variables' slice)."""

    def __init__(self, steps):
        super().__init__()
        self.inner, self.steps = dense(3, inputs=5, seed=1), tuple(steps)
        self.seen = keras.metrics.Mean("seen")

    def call(self, x, training=False):
        return self.inner(x)

    def train_step(self, *arguments):
        if BACKEND == "jax":
            return self._stateless_step(*arguments)
        x, y = arguments[0][:2]
        for optimizer_of, rows in self.steps:
            variables = self.trainable_variables[rows]
            loss, grads = gradients(lambda: self.compute_loss(x, y, self(x, training=True)), variables)
            apply(optimizer_of(self), grads, variables)
        self.seen.update_state(loss, sample_weight=keras.ops.shape(y)[0])
        return {"seen": self.seen.result(), "loss": loss, "under_another_name": self.seen.result()}

    def _stateless_step(self, state, data):
        """The step of Keras's guide for JAX."""
        import jax

        trainable, fixed, optimizer, metrics = state
        x, y = data[:2]

        def loss_of(trainable):
            outputs, updated = self.stateless_call(trainable, fixed, x, training=True)
            return self.compute_loss(x, y, outputs), updated

        (loss, fixed), grads = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        mapping = list(zip(self.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            self.seen.update_state(loss, sample_weight=y.shape[0])
            logs = {"seen": self.seen.result(), "loss": loss, "under_another_name": self.seen.result()}
        values = [scope.get_current_value(v) for v in self.metrics_variables]
        return logs, (
            trainable,
            fixed,
            optimizer,
            [m if v is None else v for m, v in zip(metrics, values, strict=True)],
        )


def one_optimizer(*steps):
    model = OneOptimizer(steps or [(lambda model: model.optimizer, slice(None))])
    model(data()[0][:1])
    model.compile(keras.optimizers.SGD(0.2, momentum=0.9, weight_decay=0.01), "mse", jit_compile=BACKEND == "jax")
    return model


@pytest.mark.every_backend
@pytest.mark.three_ranks
@pytest.mark.world_size(2, 3)
def test_a_train_step_with_one_optimizer_trains_as_in_one_process(kit):
    model, reference = one_optimizer(), one_optimizer()
    history = fit(hvdtrain.Trainer(model))
    logs = train_alone(reference, 2)
    kit.assert_close(model, reference)
    kit.assert_same_everywhere(model)
    for name in ("seen", "loss", "under_another_name"):  # the loss is a mean of the batch, and no metric holds it
        assert history[name] == pytest.approx([each["seen"] for each in logs], abs=1e-6)


@pytest.mark.world_size(2)
def test_steps_that_are_not_reduced_are_found(kit):
    needs_several_optimizers()
    hidden = keras.optimizers.SGD(0.2)
    with pytest.raises(ValueError, match="called no optimizer that reduces"):
        fit(hvdtrain.Trainer(one_optimizer((lambda model: hidden, slice(None)))))
    other = keras.optimizers.SGD(0.2)
    half = one_optimizer((lambda model: model.optimizer, slice(0, 2)), (lambda model: other, slice(2, 4)))
    with pytest.raises(DesyncError, match="an optimizer that is no attribute of the model"):
        fit(hvdtrain.Trainer(half))


@pytest.mark.world_size(2)
def test_what_several_optimizers_cannot_do_is_refused(kit):
    needs_several_optimizers()
    for options in ({"accumulate": 2}, {"nan_policy": "skip"}, {"precision": "fp16"}):
        with pytest.raises(ValueError, match=r"needs a model with one optimizer.*d_optimizer, g_optimizer"):
            hvdtrain.Trainer(gan(), **options)
    model = gan()
    model.g_optimizer = keras.optimizers.SGD()
    with pytest.raises(ValueError, match=r"self\.g_optimizer\.build"):
        hvdtrain.Trainer(model)
