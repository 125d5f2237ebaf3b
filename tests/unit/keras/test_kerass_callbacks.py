"""Keras's own callbacks do in the Trainer what they do in Keras's fit: the same calls, logs, files and weights.

In one process; KERAS_BACKEND chooses the backend.
"""

from __future__ import annotations

import csv
import logging

import pytest

keras = pytest.importorskip("keras")

import numpy as np  # noqa: E402

import hvdtrain  # noqa: E402
from hvdtrain.callbacks.keras_style import KerasStyle  # noqa: E402
from hvdtrain.data import sharding  # noqa: E402

pytestmark = pytest.mark.usefixtures("solo")

X = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(10, 3)).astype(np.float32)
EPOCHS, BATCH = 4, 4
HOOKS = [
    *(f"on_{what}_{when}" for what in ("train", "test", "epoch") for when in ("begin", "end")),
    *(f"on_{what}_batch_{when}" for what in ("train", "test") for when in ("begin", "end")),
]


class Calls(keras.callbacks.Callback):
    """Records each call with its logs."""

    def __init__(self):
        super().__init__()
        self.seen = []


def _record(hook):
    def method(self, *arguments, logs=None):
        index, given = (arguments[0], logs) if "batch" in hook else (arguments[0], arguments[1])
        self.seen.append((hook, index, dict(given)))

    def whole(self, logs):
        self.seen.append((hook, None, dict(logs)))

    return method if "batch" in hook or "epoch" in hook else whole


for _hook in HOOKS:
    setattr(Calls, _hook, _record(_hook))


class InOrder(keras.utils.PyDataset):
    """The batches of the Trainer's epochs, for plain Keras."""

    def __init__(self):
        super().__init__()
        self.epoch = 0

    def __len__(self):
        return -(-len(X) // BATCH)

    def __getitem__(self, index):
        rows = sharding.epoch_order(len(X), epoch=self.epoch)[BATCH * index : BATCH * (index + 1)]
        return X[rows], Y[rows]


class NextEpoch(keras.callbacks.Callback):
    def __init__(self, data):
        super().__init__()
        self.data = data

    def on_epoch_begin(self, epoch, logs=None):
        self.data.epoch = epoch


def make_model(optimizer=None):
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    generator = np.random.default_rng(0)
    net.set_weights([generator.normal(size=w.shape).astype(np.float32) * 0.3 for w in net.get_weights()])
    net.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"], jit_compile=False)
    return net


def in_keras(callbacks, *, optimizer=None, epochs=EPOCHS):
    net, data = make_model(optimizer), InOrder()
    options = {"epochs": epochs, "shuffle": False, "verbose": 0, "callbacks": [NextEpoch(data), *callbacks]}
    net.fit(data, validation_data=(X, Y), validation_batch_size=BATCH, **options)
    return net


def in_trainer(callbacks, *, optimizer=None, epochs=EPOCHS, **options):
    net = make_model(optimizer)
    options = {"epochs": epochs, "batch_size": BATCH, "progress": False, "run_dir": None, **options}
    hvdtrain.Trainer(net).fit((X, Y), validation=(X, Y), callbacks=callbacks, **options)
    return net


def weights(net):
    return [np.array(w) for w in net.get_weights()]


def assert_same(ours, theirs):
    for mine, other in zip(weights(ours), weights(theirs), strict=True):
        np.testing.assert_array_equal(mine, other)


def assert_same_calls(ours, theirs):
    assert [call[:2] for call in ours.seen] == [call[:2] for call in theirs.seen]
    for (hook, index, mine), (_, _, other) in zip(ours.seen, theirs.seen, strict=True):
        assert {name: mine.get(name) for name in other} == pytest.approx(other, rel=1e-6, nan_ok=True), (hook, index)


class StopAtBatch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = (self.epoch, batch) == (1, 1)


def overflow():
    return keras.optimizers.SGD(1e30)


def ema():
    return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7)


@pytest.mark.parametrize(
    ("callbacks", "optimizer"),
    [
        (list, None),
        (lambda: [keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr / (1 + epoch))], None),
        (lambda: [keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=10.0)], None),
        (lambda: [keras.callbacks.EarlyStopping(patience=1, min_delta=10.0, restore_best_weights=True)], None),
        (lambda: [StopAtBatch()], None),
        (lambda: [keras.callbacks.TerminateOnNaN()], overflow),
        (list, ema),
        (lambda: [keras.callbacks.SwapEMAWeights()], ema),
        (lambda: [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)], ema),
    ],
    ids=["none", "scheduler", "plateau", "early stopping", "stop", "nan", "ema", "swap", "swap on epoch"],
)
def test_callbacks_are_called_with_kerass_logs_and_leave_kerass_weights(callbacks, optimizer):
    plain, ours = Calls(), Calls()
    other = in_keras([*callbacks(), plain], optimizer=optimizer and optimizer())
    mine = in_trainer([*callbacks(), ours], optimizer=optimizer and optimizer())
    assert_same_calls(ours, plain)
    assert_same(mine, other)
    assert float(mine.optimizer.learning_rate) == float(other.optimizer.learning_rate)
    assert ours.params.keys() >= plain.params.keys()


def test_logs_of_batches_are_read_only_for_who_has_a_hook(monkeypatch, tmp_path):
    reads = []
    read = hvdtrain.Trainer.local_metrics
    monkeypatch.setattr(hvdtrain.Trainer, "local_metrics", lambda self: reads.append(1) or read(self))
    saving = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras", verbose=0)
    in_trainer([saving, keras.callbacks.EarlyStopping()], epochs=1)
    assert not reads
    seen = []
    in_trainer([keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs))], epochs=1)
    assert [set(logs) for logs in seen] == [{"loss", "mae"}] * 3
    assert len(reads) == 3


def test_files_are_kerass(tmp_path):
    for name, run in (("keras", in_keras), ("ours", in_trainer)):
        folder = tmp_path / name
        folder.mkdir()
        options = {"save_weights_only": True, "save_best_only": True, "monitor": "loss"}
        run(
            [
                keras.callbacks.ModelCheckpoint(folder / "{epoch}-{batch}.weights.h5", save_freq=2, **options),
                keras.callbacks.ModelCheckpoint(folder / "best.weights.h5", **options),
                keras.callbacks.CSVLogger(folder / "log.csv"),
            ]
        )
    assert {p.name for p in (tmp_path / "ours").iterdir()} == {p.name for p in (tmp_path / "keras").iterdir()}
    nets = []
    for name in ("keras", "ours"):
        nets.append(make_model())
        nets[-1].optimizer.build(nets[-1].trainable_variables)
        nets[-1].load_weights(tmp_path / name / "best.weights.h5")
    assert_same(*nets)
    texts = ((tmp_path / name / "log.csv").read_text() for name in ("keras", "ours"))
    plain, ours = (list(csv.DictReader(text.splitlines())) for text in texts)
    for mine, other in zip(ours, plain, strict=True):
        assert {name: float(mine[name]) for name in other} == pytest.approx({n: float(v) for n, v in other.items()})


def test_backup_and_restore_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"fit\(checkpoint_dir="):
        in_trainer([keras.callbacks.BackupAndRestore(tmp_path)])


def test_a_run_that_early_stopping_has_ended_trains_no_further_when_resumed(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="hvdtrain")

    def run():
        stop = keras.callbacks.EarlyStopping(patience=1, min_delta=10.0, restore_best_weights=True)
        calls = Calls()
        net = in_trainer([stop, calls], checkpoint_dir=str(tmp_path))
        return stop, [hook for hook, *_ in calls.seen].count("on_epoch_begin"), net

    first, epochs, before = run()
    assert epochs == 2
    assert "nothing is left to train" not in caplog.text
    again, epochs, after = run()
    assert caplog.text.count("nothing is left to train: a callback") == 1
    assert epochs == 0
    assert again.stopped_epoch == first.stopped_epoch == 1
    assert_same(after, before)


def test_a_resumed_run_judges_improvement_as_a_straight_one(tmp_path):
    """Keras negates min_delta in the first epoch of a process."""

    def run(epochs, **options):
        slower = keras.callbacks.ReduceLROnPlateau(min_delta=0.5, patience=1, factor=0.5, min_lr=0.0)
        return in_trainer([slower], epochs=epochs, **options)

    straight = run(6)
    run(2, checkpoint_dir=str(tmp_path))
    resumed = run(6, checkpoint_dir=str(tmp_path))
    assert float(straight.optimizer.learning_rate) < 0.05
    assert float(resumed.optimizer.learning_rate) == float(straight.optimizer.learning_rate)
    assert_same(resumed, straight)


def test_what_a_callback_sets_when_training_begins_is_not_restored_and_what_it_counts_is(tmp_path):
    class Own(keras.callbacks.Callback):
        def __init__(self, process):
            super().__init__()
            self.process, self.epochs = process, 0

        def on_train_begin(self, logs=None):
            self.rank = self.process

        def on_epoch_end(self, epoch, logs=None):
            self.epochs += 1

    first, again = Own(7), Own(8)
    in_trainer([first], epochs=2, checkpoint_dir=str(tmp_path))
    in_trainer([again], epochs=4, checkpoint_dir=str(tmp_path))
    assert (again.rank, again.epochs) == (8, 4)


@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_swapped_weights_are_resumed(tmp_path, swap_on_epoch):
    def run(epochs, **options):
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)
        # Keras's callback drops the weights that are not averaged after the epoch that it is told is the last.
        told = keras.callbacks.LambdaCallback(on_train_begin=lambda _: swap.params.update(epochs=EPOCHS))
        return in_trainer([swap, told], optimizer=ema(), epochs=epochs, **options)

    straight = run(EPOCHS)
    run(2, checkpoint_dir=str(tmp_path))
    assert_same(run(EPOCHS, checkpoint_dir=str(tmp_path)), straight)


def test_keras_writers_are_silent_beside_the_root():
    class Context:
        model, epochs, steps_per_epoch = make_model(), 1, 1

        class world:  # noqa: N801
            is_root = False

    writer, own = keras.callbacks.CSVLogger("never.csv"), Calls()
    for callback in (writer, own):
        KerasStyle(callback).on_fit_begin(Context())
    assert writer.csv_file is None
    assert len(own.seen) == 1


class OwnStep(keras.Model):
    """Returns a metric under another name, one that it never updates, and the batch's own error."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(3)
        self.squares, self.unused = keras.metrics.Mean("squares"), keras.metrics.Mean("unused")

    def call(self, x):
        return self.inner(x)

    def test_step(self, data):
        x, y = data[:2]
        error = keras.ops.mean(keras.ops.square(keras.ops.convert_to_tensor(y) - self(x)))
        self.squares.update_state(error, sample_weight=keras.ops.shape(y)[0])
        return {"so_far": self.squares.result(), "squares": self.squares.result(), "unused": error * 2, "raw": error}


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="a step on JAX returns its state too")
def test_what_a_step_returns_is_a_metrics_result_or_a_mean_over_samples(caplog):
    net = OwnStep()
    net(X)
    net.compile("sgd", "mse", jit_compile=False)
    trainer = hvdtrain.Trainer(net)
    with caplog.at_level(logging.INFO, logger="hvdtrain"):
        found = [trainer.evaluate((X, Y), batch_size=3) for _ in range(2)][-1]
    error = float(np.square(Y - np.asarray(net.predict_on_batch(X))).mean())
    assert found == pytest.approx({"so_far": error, "squares": error, "unused": error * 2, "raw": error}, rel=1e-5)
    lines = [record.message for record in caplog.records if "no metric of the model holds" in record.message]
    assert len(lines) == 1
    assert "returns raw, unused, which" in lines[0]
