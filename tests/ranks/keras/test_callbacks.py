"""The callbacks do on Keras 3 what Horovod's did on Keras 2, and nothing beside it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras.ops import convert_to_numpy as to_numpy

import hvdtrain.keras as hvd

pytestmark = pytest.mark.world_size(2, 3)


@pytest.mark.every_backend
def test_broadcast_gives_all_ranks_the_roots_weights(kit):
    root = hvd.size() - 1
    alone = kit.alone(kit.model(seed=1 + 10 * root), keras.optimizers.SGD(0.1, momentum=0.9))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(root)]
    model = kit.model(seed=1 + 10 * hvd.rank())
    kit.together(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), callbacks=callbacks)
    kit.assert_close(model, alone)
    kit.assert_same_everywhere(model)


def test_broadcast_gives_all_ranks_the_roots_optimizer_state(kit):
    """Only the root has trained before: its momentum, its step count and its weights reach the others."""
    alone = kit.alone(kit.model(), keras.optimizers.Adam(0.01))
    model = kit.model()
    if hvd.rank() == 0:
        kit.alone(model, keras.optimizers.Adam(0.01), epochs=2)
        optimizer = hvd.DistributedOptimizer(model.optimizer)
    else:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.5))
    kit.together(model, optimizer, epochs=1, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    kit.assert_close(model, alone)
    kit.assert_same_everywhere(model)


def test_broadcast_changes_nothing_on_the_root_and_no_seeds(kit):
    keras.utils.set_random_seed(100 + hvd.rank())
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.AdamW(0.1, weight_decay=0.1)), loss="mse")
    model.optimizer.build(model.trainable_variables)
    before = kit.digest([*model.weights, *model.optimizer.variables])
    seeds = [to_numpy(v).tolist() for v in model.variables if "seed" in v.path]
    hvd.broadcast_global_variables(0, model)
    assert seeds == [to_numpy(v).tolist() for v in model.variables if "seed" in v.path]
    assert len({str(s) for s in hvd.allgather_object(seeds)}) == hvd.size()
    if hvd.rank() == 0:
        assert before == kit.digest([*model.weights, *model.optimizer.variables])
    kit.assert_same_everywhere(model)


@pytest.mark.every_backend
def test_broadcast_carries_every_dtype_bit_for_bit(kit):
    values = [np.array([1, -2], "int32"), np.array([True, False]), np.array([np.nan, 1e-40], "float32")]
    values += [np.array([1.5, -0.0], "float16"), np.arange(3, dtype="uint8")]
    variables = [
        keras.Variable(v if hvd.rank() == 0 else np.zeros_like(v), dtype=str(v.dtype), trainable=False) for v in values
    ]
    variables.append(keras.Variable([1.0 + hvd.rank()], dtype="bfloat16"))
    hvd.broadcast_variables(variables, root_rank=0)
    digest = kit.digest(variables)
    assert hvd.allgather_object(digest) == [digest] * hvd.size()
    assert float(to_numpy(variables[-1])[0]) == 1.0


def test_local_variables_stay_local(kit):
    model = kit.model(seed=1 + 10 * hvd.rank())
    local = model.get_layer("head").kernel
    before = to_numpy(local).copy()
    model.compile(optimizer=hvd.DistributedOptimizer("sgd"), loss="mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[local])
    callback.set_model(model)
    callback.on_train_begin()
    assert (to_numpy(local) == before).all()
    hidden = kit.digest(model.get_layer("hidden").weights)
    assert hvd.allgather_object(hidden) == [hidden] * hvd.size()


class _Spy(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.logs = []

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(dict(logs))


def test_metrics_are_averaged_for_history_and_later_callbacks(kit):
    before, after = _Spy(), _Spy()
    x, y = kit.data()
    model = kit.model()
    model.compile(optimizer=hvd.DistributedOptimizer("sgd"), loss="mse", metrics=["mae"])
    history = model.fit(
        kit.shard(x),
        kit.shard(y),
        validation_data=(kit.shard(x), kit.shard(y)),
        batch_size=24 // hvd.size(),
        epochs=2,
        verbose=0,
        shuffle=False,
        callbacks=[before, hvd.callbacks.MetricAverageCallback(), after],
    )
    everybody = hvd.allgather_object(before.logs)
    assert everybody[0] != everybody[1]
    for epoch in range(2):
        for name in ("loss", "mae", "val_loss", "val_mae"):
            mean = np.mean([logs[epoch][name] for logs in everybody])
            assert after.logs[epoch][name] == pytest.approx(mean, rel=1e-12)
            assert history.history[name][epoch] == after.logs[epoch][name]
    assert hvd.allgather_object(history.history) == [history.history] * hvd.size()


def test_a_metric_that_one_rank_lacks_does_not_hang(kit):
    logs = {"loss": 1.0 + hvd.rank()}
    if hvd.rank() == 0:
        logs["val_loss"] = 4.0
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": 1.0 + (hvd.size() - 1) / 2, "val_loss": 4.0}


class _Rates(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(float(to_numpy(self.model.optimizer.learning_rate)))


def test_warmup_rises_from_one_ranks_rate_to_all_ranks(kit):
    rates = _Rates()
    size = hvd.size()
    callbacks = [hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * size, warmup_epochs=2), rates]
    model = kit.together(
        kit.model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * size)), epochs=3, callbacks=callbacks
    )
    expected = [0.1 * ((step + 1) / 2 * (size - 1) / 2 + 1) for step in range(4)]
    np.testing.assert_allclose(rates.rates, [*expected, 0.1 * size, 0.1 * size], rtol=1e-6)
    assert model.history.history["lr"][-1] == pytest.approx(0.1 * size)
    kit.assert_same_everywhere(model)


@pytest.mark.parametrize("correction", [pytest.param(True, marks=pytest.mark.every_backend), False])
def test_momentum_follows_the_rate(kit, correction):
    """With correction, a step after the rate changed is v = momentum * new / old * v - new * g, as in the paper."""
    x, y = kit.data()
    weights, velocity, rate = _numpy_model(), None, 0.1
    for step in range(6):
        epoch = step // 2
        new = 0.1 * [1.0, 0.5, 2.0][epoch]
        gradient = _numpy_gradient(weights, x[(step % 2) * 24 :][:24], y[(step % 2) * 24 :][:24])
        velocity = np.zeros_like(gradient) if velocity is None else velocity * ((new / rate) if correction else 1.0)
        velocity = 0.9 * velocity - new * gradient
        weights = weights + velocity
        rate = new
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, use_bias=False)])
    model.layers[0].kernel.assign(_numpy_model())
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        0.1, lambda epoch: [1.0, 0.5, 2.0][int(epoch)], momentum_correction=correction
    )
    kit.together(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), callbacks=[schedule])
    np.testing.assert_allclose(to_numpy(model.layers[0].kernel), weights, atol=2e-6)


def _numpy_model():
    return np.linspace(-1, 1, 15).reshape(5, 3)


def _numpy_gradient(weights, x, y):
    return 2 * x.T @ (x @ weights - y) / y.size


def test_the_best_model_is_written_by_the_root_alone(kit, tmp_path):
    file = tmp_path / f"best-{hvd.rank()}.keras"
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=str(file))
    kit.together(kit.model(), hvd.DistributedOptimizer("sgd"), callbacks=[best])
    assert file.exists() == (hvd.rank() == 0)
