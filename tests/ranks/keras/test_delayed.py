"""`sync=Delayed()` on Keras: what ranks train, what is in flight when, and what a checkpoint holds of it."""

from __future__ import annotations

import importlib
import time

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint, SyncCheck
from hvdtrain.data import sharding
from hvdtrain.distributed.world import World
from hvdtrain.telemetry import interval

BACKEND = keras.backend.backend()
BATCH, LR, MOMENTUM, DECAY = 4, 0.1, 0.9, 0.01
IN_FLIGHT = f"hvdtrain.keras.delayed.{BACKEND}"

pytestmark = pytest.mark.every_backend


def data(samples):
    generator = np.random.default_rng(0)
    return [generator.normal(size=(samples, columns)).astype(np.float32) for columns in (6, 3)]


def model(*layers):
    net = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
    generator = np.random.default_rng(0)
    net.set_weights([generator.normal(size=w.shape).astype(np.float32) for w in net.get_weights()])
    return net


def fit(net, samples=22, *, callbacks=(), epochs=2, **options):
    optimizer = keras.optimizers.SGD(LR, momentum=MOMENTUM, weight_decay=DECAY)
    trainer = hvdtrain.Trainer(net, optimizer=optimizer, loss="mse", sync=hvdtrain.Delayed(), **options)
    trainer.fit(
        data(samples), epochs=epochs, batch_size=BATCH, callbacks=callbacks, progress=False, run_dir=None
    )  # fmt: skip
    return trainer


def one_process(samples, batch, *, clip_norm=None, epochs=2):
    """Train the linear model in float64, each gradient one step late."""
    x, y = data(samples)
    weights = [w.astype(np.float64) for w in model().get_weights()]
    momenta, before = [np.zeros_like(w) for w in weights], None

    def apply(gradients):
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        factor = min(1.0, clip_norm / norm) if clip_norm else 1.0
        for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
            weight -= weight * DECAY * LR
            momentum *= MOMENTUM
            momentum -= LR * gradient * factor
            weight += momentum

    for epoch in range(epochs):
        order = sharding.epoch_order(samples, epoch=epoch, seed=0)
        for begin in range(0, samples, batch):
            rows = order[begin : begin + batch]
            error = 2 * (x[rows] @ weights[0] + weights[1] - y[rows]) / (3 * len(rows))
            gradients = x[rows].T @ error, error.sum(0)
            if before is not None:
                apply(before)
            before = gradients
    apply(before)
    return weights


@pytest.mark.world_size(2, 3)
@pytest.mark.three_ranks
@pytest.mark.parametrize(
    ("samples", "options", "atol"),
    [
        (22, {}, 1e-6),  # the last steps have uneven shares
        (22, {"accumulate": 3, "clip_norm": 0.05}, 1e-6),
        (1, {}, 1e-6),  # a rank without samples
        (22, {"compression": "fp16"}, 2e-3),
        (22, {"compression": "bf16"}, 2e-2),
    ],
)
def test_ranks_train_the_weights_of_one_process_that_delays(samples, options, atol):
    net = model()
    trainer = fit(net, samples, callbacks=[SyncCheck(every=1)], **options)  # all ranks apply the same mean
    size, passes = trainer.world.size, options.get("accumulate", 1)
    expected = one_process(samples, BATCH * size * passes, clip_norm=options.get("clip_norm"))
    for ours, theirs in zip(net.get_weights(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=atol)
        everyone = trainer.world.allgather(ours[None], name="ours")
        np.testing.assert_array_equal(everyone, np.broadcast_to(ours, everyone.shape))


class Held(Callback):
    """Notes the gradient in flight after each step."""

    def __init__(self):
        self.names, self.equal = [], True

    def on_step_end(self, trainer, step):
        state = trainer.state()
        self.names.append(sorted(name for name in state.arrays if name.startswith("sync.")))
        assert state.pending == set(self.names[-1])
        for name in self.names[-1]:
            everyone = trainer.world.allgather(np.asarray(state.arrays[name])[None], name=name)
            self.equal &= bool((everyone == everyone[:1]).all())


@pytest.mark.world_size(2)
def test_checkpoints_hold_the_mean_of_the_gradient_in_flight_and_do_not_change_it():
    held, plain, watched = Held(), model(), model()
    trainer = fit(watched, callbacks=[held])
    fit(plain)
    kernel, bias = (
        f"sync.gradient.0000{number}.sequential/dense/{name}" for number, name in enumerate(("kernel", "bias"))
    )
    assert held.names == [[kernel, bias]] * 6
    assert held.equal
    assert not any(name.startswith("sync.") for name in trainer.state().arrays)
    for ours, theirs in zip(watched.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.world_size(2)
def test_a_run_without_a_delay_resumes_from_a_checkpoint_with_one(shared_tmp_path):
    fit(model(), epochs=1, callbacks=[Checkpoint(shared_tmp_path)])
    net = model()
    trainer = hvdtrain.Trainer(
        net, optimizer=keras.optimizers.SGD(LR, momentum=MOMENTUM, weight_decay=DECAY), loss="mse"
    )
    history = trainer.fit(
        data(22), epochs=2, batch_size=BATCH, callbacks=[Checkpoint(shared_tmp_path)], progress=False, run_dir=None
    )
    assert len(history["loss"]) == 2
    resumed = fit(model(), epochs=3, callbacks=[Checkpoint(shared_tmp_path)])  # whose checkpoint has no gradient
    assert resumed.global_step == 9


class Begins(Callback):
    """Notes where steps begin."""

    def __init__(self, events):
        self.events = events

    def on_step_begin(self, trainer, step):
        self.events.append("begin")


def check_that_the_graph_reduces_during_the_forward_pass(monkeypatch, compression):
    import tensorflow as tf

    module = importlib.import_module(IN_FLIGHT)
    whole, reductions = module.reduce_unwatched, module.untracked(0, tf.int64)
    begun, missing = [], []

    def wait():
        until = time.monotonic() + 5
        while int(reductions) < len(begun) - 1 and time.monotonic() < until:
            time.sleep(0.01)
        missing.append(len(begun) - 1 - int(reductions))

    class Waits(keras.layers.Layer):
        """Lets the forward pass of a step wait until the gradient of the step before is reduced."""

        def call(self, inputs, training=False):
            if not training:
                return inputs
            with tf.control_dependencies([tf.py_function(wait, [], [])]):
                return tf.identity(inputs)

    def reduce(*args):
        results = whole(*args)
        with tf.control_dependencies(results):
            reductions.assign_add(1)
        return results

    monkeypatch.setattr(module, "reduce_unwatched", reduce)
    fit(model(Waits()), 32, epochs=1, callbacks=[Begins(begun)], compression=compression)
    assert missing[-4:] == [0, 0, 0, 0]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("compression", ["none", "int8"])
def test_a_gradient_is_reduced_while_the_next_step_computes(monkeypatch, compression):
    if BACKEND == "tensorflow":
        check_that_the_graph_reduces_during_the_forward_pass(monkeypatch, compression)
        return
    events = []
    module = importlib.import_module(IN_FLIGHT)
    whole, allreduce = module.start, World.allreduce

    def start(*args, **options):
        events.append("start")
        wait = whole(*args, **options)
        return lambda: events.append("wait") or wait()

    def heartbeat(self, *args, name="host", **options):
        events.extend([name] if name == "heartbeat" else [])
        return allreduce(self, *args, name=name, **options)

    monkeypatch.setattr(module, "start", start)
    monkeypatch.setattr(World, "allreduce", heartbeat)
    monkeypatch.setattr(interval, "INTERVAL_S", 0.0)  # a heartbeat in each step, where no gradient is in flight
    fit(model(), 32, epochs=1, callbacks=[Begins(events)], compression=compression)
    step = ["begin", "wait", "heartbeat", "start"]
    # SyncCheck, which Trainer adds, compares ranks after the first step, and waits for its gradient.
    assert events == ["begin", "heartbeat", "start", "wait", "begin", "heartbeat", "start", *step, *step, "wait"]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_a_run_with_compression_resumes_bit_for_bit(shared_tmp_path, compression):
    whole = model()
    fit(whole, compression=compression)
    for epochs in (1, 2):
        net = model()
        fit(net, epochs=epochs, callbacks=[Checkpoint(shared_tmp_path)], compression=compression)
    for ours, theirs in zip(net.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Repairs(Callback):
    def on_step_end(self, trainer, step):
        if step == 1:
            trainer.repair()


@pytest.mark.world_size(2)
def test_a_repair_keeps_the_gradient_in_flight():
    whole, repaired = model(), model()
    fit(whole)
    fit(repaired, callbacks=[Repairs()])
    for ours, theirs in zip(repaired.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
