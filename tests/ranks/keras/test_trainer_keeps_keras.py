"""The Trainer leaves to Keras what is Keras's: callbacks, compiled settings, train_step overrides, saved files."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain.distributed import world
from hvdtrain.telemetry import interval

SIZES = pytest.mark.world_size(2, 3)


def equal_on_all_ranks(model):
    flat = np.concatenate([np.asarray(w).reshape(-1) for w in model.get_weights()])
    everybody = world.current().allgather(flat[None])
    return bool((everybody == everybody[0]).all())


@SIZES
def test_keras_callbacks_run_with_what_keras_would_pass_them(kit):
    x, y = kit.data()
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            seen.append(f"train {self.params['epochs']} {self.params['steps']}")

        def on_train_batch_end(self, batch, logs=None):
            seen.append(f"batch {batch}")

        def on_epoch_end(self, epoch, logs=None):
            seen.append(f"epoch {epoch} {'loss' in logs}")
            # One rank is enough: the others must not train on alone.
            self.model.stop_training = epoch == 1 and hvd.rank() == hvd.size() - 1

    trainer = hvdtrain.Trainer(kit.model(), optimizer="sgd", loss="mse")
    batch_size = len(x) // 2 // hvd.size()
    history = trainer.fit((x, y), epochs=4, batch_size=batch_size, callbacks=[Watch()], progress=False)
    assert seen[:4] == ["train 4 2", "batch 0", "batch 1", "epoch 0 True"]
    assert len(history["loss"]) == 2


@SIZES
def test_a_rank_that_stops_in_an_epoch_stops_all_after_the_same_step(kit, monkeypatch):
    x, y = kit.data()
    monkeypatch.setattr(interval, "INTERVAL_S", 0.0)  # ranks exchange after every step

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2 and hvd.rank() == hvd.size() - 1

    trainer = hvdtrain.Trainer(kit.model(), optimizer="sgd", loss="mse")
    history = trainer.fit((x, y), epochs=2, batch_size=2, callbacks=[Stop()], progress=False)
    assert trainer.global_step == 3
    assert len(history["loss"]) == 1


@pytest.mark.in_graphs
@pytest.mark.world_size(2)
def test_tensorboard_has_one_writer_and_the_exact_metrics(kit, shared_tmp_path):
    tf = pytest.importorskip("tensorflow")
    x, y = kit.data()
    trainer = hvdtrain.Trainer(kit.model(), optimizer="sgd", loss="mse")
    board = keras.callbacks.TensorBoard(shared_tmp_path, write_graph=False)
    history = trainer.fit((x, y), validation=(x, y), epochs=2, batch_size=12, callbacks=[board], progress=False)
    world.current().barrier()
    for folder, name in (("train", "loss"), ("validation", "val_loss")):
        (file,) = (shared_tmp_path / folder).iterdir()
        events = [event for event in tf.compat.v1.train.summary_iterator(str(file)) if event.summary.value]
        values = [tf.make_ndarray(v.tensor) for e in events for v in e.summary.value if v.tag == "epoch_loss"]
        assert values == pytest.approx(history[name])


@SIZES
def test_a_compiled_model_keeps_its_loss_metrics_and_optimizer(kit):
    x, y = kit.data()
    model = kit.model(seed=1 + hvd.rank())
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mae", metrics=["mse"], jit_compile=False)
    history = hvdtrain.Trainer(model).fit((x, y), epochs=2, batch_size=4, progress=False)
    assert {"loss", "mse"} <= set(history)
    assert isinstance(model.optimizer, keras.optimizers.Adam)
    assert equal_on_all_ranks(model)


@pytest.mark.world_size(2)
def test_a_torch_dataloader_trains_what_arrays_of_its_samples_train(kit):
    torch = pytest.importorskip("torch")
    x, y = kit.data()
    weight = np.linspace(0.5, 1.5, len(x)).astype(np.float32)
    inputs = {"left": x[:, :1], "right": x[:, 1:]}
    rows = [({name: torch.tensor(each[i]) for name, each in inputs.items()}, y[i], weight[i]) for i in range(len(x))]
    loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)

    def trained(data):
        sides = {name: keras.Input(each.shape[1:], name=name) for name, each in inputs.items()}
        both = keras.layers.Concatenate()(list(sides.values()))
        model = keras.Model(sides, keras.layers.Dense(y.shape[1], kernel_initializer="ones")(both))
        trainer = hvdtrain.Trainer(model, optimizer="sgd", loss="mse")
        trainer.fit(data, epochs=2, batch_size=4, progress=False)
        return [*model.get_weights(), trainer.evaluate(data, batch_size=4)["loss"]]

    for ours, theirs in zip(trained(loader), trained((inputs, y, weight)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.every_backend
@SIZES
def test_a_train_step_of_the_users_own_is_run(kit):
    inner = kit.model()
    calls = []

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def call(self, x):
            return self.inner(x)

        def train_step(self, *args, **kwargs):
            calls.append(1)
            return super().train_step(*args, **kwargs)

    x, y = kit.data()
    model = Own()
    model(x[:1])
    hvdtrain.Trainer(model, optimizer="sgd", loss="mse").fit((x, y), epochs=1, batch_size=4, progress=False)
    assert calls
    assert equal_on_all_ranks(model)


@pytest.mark.every_backend
@SIZES
def test_a_model_that_its_first_batch_builds_starts_from_the_roots_weights(kit):
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(3)])
    x, y = kit.data()
    hvdtrain.Trainer(model, optimizer="sgd", loss="mse").fit((x, y), epochs=1, batch_size=4, progress=False)
    assert equal_on_all_ranks(model)


@SIZES
def test_a_trained_model_is_saved_as_plain_keras(kit, shared_tmp_path):
    x, y = kit.data()
    model = kit.model()
    hvdtrain.Trainer(model, optimizer=keras.optimizers.Adam(0.01), loss="mse", accumulate=2).fit(
        (x, y), epochs=1, batch_size=4, progress=False
    )
    path = shared_tmp_path / "model.keras"
    if world.current().is_root:
        model.save(path)
    world.current().barrier()
    loaded = keras.saving.load_model(path)
    assert type(loaded.optimizer) is type(keras.optimizers.Adam())
    for ours, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        assert (ours == theirs).all()


@SIZES
def test_a_learning_rate_schedule_is_not_scaled_behind_its_back(kit):
    x, y = kit.data()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    trainer = hvdtrain.Trainer(kit.model(), optimizer=keras.optimizers.SGD(schedule), loss="mse", lr_scaling="linear")
    with pytest.raises(ValueError, match=r"into the schedule\. Received: ExponentialDecay"):
        trainer.fit((x, y), epochs=1, batch_size=4, progress=False)


@SIZES
def test_bad_input_is_shown(kit):
    with pytest.raises(ValueError, match="Received: None"):
        hvdtrain.Trainer(kit.model())
    compiled = kit.model()
    compiled.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(ValueError, match=r"compile\(\)'s loss and metrics are used\. Received: loss='mae'"):
        hvdtrain.Trainer(compiled, loss="mae")
    frozen = kit.model()
    frozen.trainable = False
    with pytest.raises(ValueError, match="no trainable parameters"):
        hvdtrain.Trainer(frozen, optimizer="sgd", loss="mse")
    other = keras.optimizers.SGD()
    other.build(kit.model().trainable_variables)
    with pytest.raises(ValueError, match="model's own variables"):
        hvdtrain.Trainer(kit.model(), optimizer=other, loss="mse")
    with pytest.raises(ValueError, match="clip_norm was given twice"):
        hvdtrain.Trainer(kit.model(), optimizer=keras.optimizers.SGD(clipnorm=1.0), loss="mse", clip_norm=1.0)


@pytest.mark.three_ranks
@pytest.mark.world_size(3)
@pytest.mark.parametrize("evaluate_first", [True, False])
def test_ranks_without_samples_neither_count_nor_lack_a_metric(kit, evaluate_first):
    x, _ = kit.data()
    x, y = x[:2], np.array([0, 1])
    net = kit.model()
    trainer = hvdtrain.Trainer(
        net,
        optimizer=keras.optimizers.SGD(0.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    right = np.asarray(net.predict_on_batch(x)).argmax(-1) == y
    if evaluate_first:
        assert trainer.evaluate((x, y), batch_size=1)["accuracy"] == pytest.approx(right.mean())
    history = trainer.fit((x, y), validation=(x, y), epochs=2, batch_size=1, progress=False)
    assert history["accuracy"] == history["val_accuracy"] == pytest.approx([right.mean()] * 2)
