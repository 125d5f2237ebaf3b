"""The Trainer's Keras adapter: accepted and refused arguments, in one process (KERAS_BACKEND sets the backend)."""

from __future__ import annotations

import logging

import pytest

keras = pytest.importorskip("keras")

import numpy as np  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

import hvdtrain  # noqa: E402
import hvdtrain.keras as hvd  # noqa: E402
from hvdtrain.data import sharding  # noqa: E402
from hvdtrain.data.sources import IndexedSource  # noqa: E402
from hvdtrain.distributed import world  # noqa: E402

pytestmark = pytest.mark.usefixtures("solo")

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
CLASSES = np.arange(8) % 3


def make_model(**dense):
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, **dense)])
    generator = np.random.default_rng(0)
    net.set_weights([generator.normal(size=w.shape).astype(np.float32) * 0.3 for w in net.get_weights()])
    return net


def two_outputs():
    inputs = keras.Input((4,))
    return keras.Model(inputs, [keras.layers.Dense(3, name="a")(inputs), keras.layers.Dense(3, name="b")(inputs)])


def weights(net):
    return [np.array(w) for w in net.get_weights()]


def fit(trainer, data=(X, Y), **options):
    return trainer.fit(data, progress=False, **{"epochs": 1, "batch_size": 4, **options})


@pytest.mark.parametrize("whose", ["model", "layer", "compiled"])
def test_half_precision_of_the_users_own_gets_loss_scaling(whose):
    net = make_model(dtype="mixed_float16" if whose != "model" else None)
    if whose == "model":
        for layer in net._flatten_layers(include_self=True):
            layer.dtype_policy = keras.DTypePolicy("mixed_float16")
    if whose == "compiled":
        net.compile(optimizer="sgd", loss="mse", auto_scale_loss=False)
    options = {} if whose == "compiled" else {"optimizer": "sgd", "loss": "mse"}
    hvdtrain.Trainer(net, **options)
    assert isinstance(net.optimizer, keras.optimizers.LossScaleOptimizer)
    assert hvd.distributed_part(net.optimizer) is not None


def test_full_precision_gets_no_loss_scaling():
    net = make_model()
    hvdtrain.Trainer(net, optimizer="sgd", loss="mse")
    assert not isinstance(net.optimizer, keras.optimizers.LossScaleOptimizer)


@pytest.mark.parametrize("data", [X, (X,)], ids=["array", "tuple"])
def test_data_without_targets_is_refused_with_the_way_out(data):
    with pytest.raises(ValueError, match=r"needs targets: give \(inputs, targets\)"):
        fit(hvdtrain.Trainer(make_model(), optimizer="sgd", loss="mse"), data)


@pytest.mark.parametrize("compiled", [True, False])
def test_an_optimizer_that_is_distributed_is_refused(compiled):
    net = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    if compiled:
        net.compile(optimizer=optimizer, loss="mse")
    with pytest.raises(ValueError, match="plain optimizer: it distributes it itself"):
        hvdtrain.Trainer(net, **({} if compiled else {"optimizer": optimizer, "loss": "mse"}))


@pytest.mark.parametrize("compression", ["powersgd:4", hvdtrain.TopK(0.1), "int8"])
def test_one_process_compresses_nothing(compression):
    nets = [make_model(), make_model()]
    nets[1].set_weights(nets[0].get_weights())
    for net, each in zip(nets, ("none", compression), strict=True):
        trainer = hvdtrain.Trainer(net, optimizer="sgd", loss="mse", compression=each)
        trainer.fit((X, Y), epochs=1, batch_size=2, progress=False, run_dir=None)
        assert not any("error" in name or "powersgd" in name for name in trainer._adapter.rank_state)
    for ours, theirs in zip(*(net.get_weights() for net in nets), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_micro_batches_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"micro_batch is for torch.*Use a smaller batch_size, and accumulate"):
        hvdtrain.Trainer(make_model(), optimizer="sgd", loss="mse", micro_batch="auto")


def test_clip_norm_leaves_the_users_optimizer_as_it_was():
    optimizer = keras.optimizers.SGD(0.1)
    for _ in range(2):
        net = make_model()
        hvdtrain.Trainer(net, optimizer=optimizer, loss="mse", clip_norm=1.0)
        assert hvd.distributed_part(net.optimizer).global_clipnorm == 1.0
    assert optimizer.global_clipnorm is None


@pytest.mark.parametrize("how", ["compiled", "given", "dict", "list"])
def test_sums_accumulate_to_one_big_sum(how):
    loss = keras.losses.MeanSquaredError(reduction="sum")
    several = how in ("dict", "list")
    if several:
        other = keras.losses.MeanAbsoluteError(reduction="sum")
        loss = {"a": loss, "b": other} if how == "dict" else [loss, other]
    data = (X, {"a": Y, "b": Y} if how == "dict" else (Y, Y)) if several else (X, Y)
    results = []
    for accumulate in (1, 2):
        keras.utils.set_random_seed(0)
        net = two_outputs() if several else make_model()
        if how == "compiled":
            net.compile(optimizer=keras.optimizers.SGD(0.01), loss=loss)
        options = {} if how == "compiled" else {"optimizer": keras.optimizers.SGD(0.01), "loss": loss}
        fit(hvdtrain.Trainer(net, accumulate=accumulate, **options), data, batch_size=8 // accumulate)
        results.append(weights(net))
    for one, two in zip(*results, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


SUM = {"reduction": "sum"}


@pytest.mark.parametrize(
    ("make", "loss", "message"),
    [
        (two_outputs, lambda: [keras.losses.MeanSquaredError(**SUM), "mse"], "all means or all sums.*1 of 2"),
        (
            lambda: make_model(kernel_regularizer="l2"),
            lambda: keras.losses.MeanSquaredError(**SUM),
            "regularizer must not",
        ),
        (make_model, lambda: keras.losses.SparseCategoricalCrossentropy(ignore_class=0), "ignore_class=0"),
        (make_model, lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"), "mean_with_sample"),
        (make_model, lambda: keras.losses.MeanSquaredError(reduction=None), "reduction=None"),
    ],
)
def test_a_loss_whose_divisor_ranks_cannot_know_is_refused(make, loss, message):
    with pytest.raises(ValueError, match=message):
        hvdtrain.Trainer(make(), optimizer="sgd", loss=loss(), accumulate=2)
    if "reduction=None" not in message:  # which Keras itself cannot train
        hvdtrain.Trainer(make(), optimizer="sgd", loss=loss())


def masked(*, several=False):
    tokens = keras.Input((5,))
    hidden = keras.layers.Embedding(4, 3, mask_zero=True)(tokens)
    return keras.Model(tokens, [keras.layers.Dense(2, name=name)(hidden) for name in ("a", "b")[: 1 + several]])


TOKENS = np.array([[1, 2, 0, 0, 0], [1, 1, 1, 1, 1], [3, 0, 0, 0, 0], [2, 2, 2, 0, 0]])


def test_batches_of_a_step_weigh_their_time_steps_that_are_not_masked():
    def losses(**options):
        keras.utils.set_random_seed(0)
        net = masked()
        trainer = hvdtrain.Trainer(net, optimizer=keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"], **options)
        targets = np.arange(40, dtype=np.float32).reshape(4, 5, 2) / 10
        data, batch_size = (TOKENS, targets), 4 // options.get("accumulate", 1)
        return fit(trainer, data, batch_size=batch_size), net.get_weights()

    history, weights = losses(accumulate=4)
    expected, expected_weights = losses()
    for name in ("loss", "mae"):
        assert history[name] == pytest.approx(expected[name], rel=1e-6)
    for got, wanted in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7)


def test_several_losses_with_a_mask_are_refused_where_a_step_is_split():
    trainer = hvdtrain.Trainer(masked(several=True), optimizer="sgd", loss=["mse", "mse"], accumulate=2)
    targets = np.zeros((4, 5, 2), np.float32)
    with pytest.raises(ValueError, match=r"2 losses of outputs in .* with a mask"):
        fit(trainer, (TOKENS, {"a": targets, "b": targets}), batch_size=1)


def test_an_own_step_with_a_mask_is_warned_of_once(caplog):
    class Own(keras.Model):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    plain = masked()
    trainer = hvdtrain.Trainer(Own(plain.input, plain.output), optimizer="sgd", loss="mse", accumulate=2)
    with caplog.at_level(logging.WARNING, logger="hvdtrain"):
        fit(trainer, (TOKENS, np.zeros((4, 5, 2), np.float32)), batch_size=1)
    assert sum("A mask reaches the outputs of" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("metrics", ["mae", ["mae"], ("mae",), {"b": ["mae"]}, keras.metrics.MeanAbsoluteError("mae")])
def test_metrics_may_be_one_several_or_by_output(metrics):
    by_output = isinstance(metrics, dict)
    net = two_outputs() if by_output else make_model()
    trainer = hvdtrain.Trainer(net, optimizer="sgd", loss="mse", metrics=metrics)
    values = trainer.evaluate((X, (Y, Y) if by_output else Y), batch_size=3)
    outputs = net.predict_on_batch(X)
    expected = np.abs(np.asarray(outputs[1] if by_output else outputs) - Y).mean()
    assert values["b_mae" if by_output else "mae"] == pytest.approx(expected, rel=1e-5)


def test_a_metric_with_a_value_per_class_is_reported_by_class():
    one_hot = np.eye(3, dtype=np.float32)[CLASSES]
    trainer = hvdtrain.Trainer(make_model(), optimizer="sgd", loss="mse", metrics=[keras.metrics.F1Score(name="f1")])
    assert {"f1/0", "f1/1", "f1/2"} <= set(trainer.evaluate((X, one_hot)))


def test_counts_that_the_user_left_in_metrics_are_not_reported():
    net = make_model()
    trainer = hvdtrain.Trainer(net, optimizer=keras.optimizers.SGD(0.0), loss="mse", metrics=["mae"])
    expected = trainer.evaluate((X, Y))["mae"]
    net.evaluate(X, Y + 100, verbose=0)
    assert trainer.evaluate((X, Y))["mae"] == pytest.approx(expected, rel=1e-5)
    net.test_on_batch(X, Y + 100)
    assert fit(trainer)["mae"][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("others", [["mse"], ["mae", "mse"], []])
def test_an_epoch_does_not_resume_with_other_metrics(tmp_path, others):
    class Stop(hvdtrain.callbacks.Callback):
        def on_step_end(self, trainer, step):
            if trainer.global_step == 2:  # after a checkpoint
                raise KeyboardInterrupt

    def run(metrics, *stop):
        save = hvdtrain.callbacks.Checkpoint(tmp_path, every_steps=1, background=False)
        trainer = hvdtrain.Trainer(make_model(), optimizer="sgd", loss="mse", metrics=metrics)
        return trainer.fit((X, Y), batch_size=2, callbacks=[save, *stop], run_dir=None, progress=False)

    with pytest.raises(KeyboardInterrupt):
        run(["mae"], Stop())
    with pytest.raises(ValueError, match=r"epoch that counted loss, mean_absolute_error\. Received: loss.*epoch's end"):
        run(others)
    assert run([keras.metrics.MeanAbsoluteError(name="mean_absolute_error")])["mean_absolute_error"]


def test_a_rank_without_samples_counts_nothing_and_has_every_metric():
    from hvdtrain.adapter import Options
    from hvdtrain.data.sources import Batch
    from hvdtrain.keras.adapter import make_adapter

    def run(step):
        lengths = []

        def reduce(vector):
            lengths.append(len(vector))
            return vector

        net = make_model()
        adapter = make_adapter(
            net, optimizer="sgd", loss="mse", metrics=["mae"], options=Options(accumulate=2), world=world.SoloWorld()
        )
        adapter.start()
        step(adapter)
        before = weights(net)
        return lengths, adapter.metrics(reduce), before

    filler, real = Batch(X[:1], Y[:1], None, 0, 2), Batch(X[:2], Y[:2], None, 2, 2)
    expected = float(np.abs(np.asarray(make_model().predict_on_batch(X[:2])) - Y[:2]).mean())
    lengths, values, _ = run(lambda adapter: adapter.eval_step(filler))
    assert lengths == run(lambda adapter: adapter.eval_step(real))[0]
    assert values["mae"] == 0.0
    _, values, _ = run(lambda adapter: adapter.train_step([filler, real]))
    assert values["mae"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_bad_step_of_one_process_is_left_out_with_all_that_it_changed(accumulate, monkeypatch):
    x, y = np.concatenate([X, -X]), np.concatenate([Y, Y])
    with_bad = x.copy()
    with_bad[5] = np.nan
    out = sharding.epoch_order(16).tolist().index(5) // (4 * accumulate)
    results = []
    for given in (with_bad, x):
        net = keras.Sequential([keras.Input((4,)), *(make() for make in (_dense, keras.layers.BatchNormalization))])
        generator = np.random.default_rng(0)
        for variable in net.trainable_variables:
            variable.assign(generator.normal(size=variable.shape).astype(np.float32))
        trainer = hvdtrain.Trainer(
            net, optimizer=keras.optimizers.AdamW(0.1), loss="mse", nan_policy="skip", accumulate=accumulate
        )
        if given is x:
            _leave_out(monkeypatch, out=out, accumulate=accumulate)
        history = fit(trainer, (given, y))
        variables = [np.array(keras.ops.convert_to_numpy(v)) for v in net.optimizer.variables]
        results.append([np.array(history["loss"]), *weights(net), *variables])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="a step on JAX has the state of one optimizer")
def test_optimizers_are_found_by_all_their_names():
    net, other = make_model(), keras.optimizers.Adam()
    other.build(net.trainable_variables)
    net.compile("sgd", "mse", jit_compile=False)
    net.main, net.others, net.by_name = net.optimizer, [other], {"other": other}
    trainer = hvdtrain.Trainer(net)
    assert net.main is net.optimizer
    assert net.others[0] is net.by_name["other"] is not other
    assert hvd.distributed_part(net.main) is not None is not hvd.distributed_part(net.others[0])
    assert trainer._adapter.learning_rates == pytest.approx([0.001, 0.01])
    net.pair = (keras.optimizers.SGD(), 1)
    net.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(ValueError, match="Keep optimizers in a list"):
        hvdtrain.Trainer(net)


def test_class_weights_are_kerass_in_training_alone():
    class_weight = {0: 1.0, 1: 5.0, 2: 0.2}
    plain, net = classifier(), classifier()
    options = {"batch_size": 8, "epochs": 2, "class_weight": class_weight}
    validation = (X, CLASSES)
    expected = plain.fit(X, CLASSES, validation_data=validation, shuffle=False, verbose=0, **options).history
    trainer = hvdtrain.Trainer(net)
    history = fit(trainer, (X, CLASSES), validation=validation, **options)
    for name in expected:
        assert history[name] == pytest.approx(expected[name], rel=1e-5)
    for ours, theirs in zip(weights(net), weights(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    assert trainer.config["class_weight"] == class_weight
    again = fit(trainer, (X, CLASSES), batch_size=8)  # they are those of one fit
    assert again["accuracy"][0] == pytest.approx(plain.evaluate(X, CLASSES, batch_size=8, verbose=0)[1])


@pytest.mark.parametrize(
    ("data", "class_weight", "message"),
    [
        ((X, CLASSES), [1.0, 5.0], r"{0: 1.0, 1: 5.0}. Received: class_weight=\[1.0, 5.0\]"),
        ((X, CLASSES), {"cat": 5.0}, "Received: class_weight={'cat': 5.0}"),
        ((X, CLASSES), {0: -1.0}, "Received: class_weight={0: -1.0}"),
        ((X, CLASSES), {0: float("nan")}, "Received: class_weight={0: nan}"),
        ((X, CLASSES, np.ones(8)), {0: 2.0}, "cannot be specified at the same time"),
        ((X, (CLASSES, CLASSES)), {0: 2.0}, r"targets that are one array.*Received: targets of type tuple"),
    ],
)
def test_class_weights_that_nothing_can_take_are_refused(data, class_weight, message):
    net = two_outputs() if isinstance(data[1], tuple) else make_model()
    trainer = hvdtrain.Trainer(net, optimizer="sgd", loss="sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match=message):
        fit(trainer, data, class_weight=class_weight)


def classifier():
    net = make_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, weighted_metrics=["accuracy"], jit_compile=False)
    return net


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="other backends compile what a step computes")
def test_on_torch_a_step_looks_once_at_its_gradients_and_fetches_no_means(monkeypatch):
    from hvdtrain.keras.backends import torch as backend

    looks, results, within = [], [], []
    look, result = backend.non_finite_flags, keras.metrics.Mean.result
    monkeypatch.setattr(backend, "non_finite_flags", lambda gradients: looks.append(0) or look(gradients))
    monkeypatch.setattr(keras.metrics.Mean, "result", lambda metric: results.append(0) or result(metric))
    net = make_model()
    trainer = hvdtrain.Trainer(net, optimizer="sgd", loss="mse", metrics=["mae"], nan_policy="raise")
    step = net.train_on_batch

    def take(*data, **options):
        before = len(results)
        logs = step(*data, **options)
        within.append(len(results) - before)
        return logs

    net.train_on_batch = take
    history = fit(trainer, validation=(X, Y), epochs=2)
    assert within == [0] * 4
    assert len(looks) == 4
    del net.train_on_batch
    assert history["loss"][-1] > 0 < history["val_mae"][-1]
    assert set(net.train_on_batch(X, Y, return_dict=True)) == {"loss", "mae"}  # the user's own call has its logs


def _dense():
    return keras.layers.Dense(3)


def _leave_out(monkeypatch, *, out, accumulate):
    """Let data come without the batches of that step."""
    epoch = IndexedSource.epoch

    def without(self, number, *, shuffle, after=None):
        batches = enumerate(epoch(self, number, shuffle=shuffle))
        return (batch for index, batch in batches if index // accumulate != out)

    monkeypatch.setattr(IndexedSource, "epoch", without)


def test_nan_policy_refuses_what_a_step_could_not_leave_out():
    with pytest.raises(ValueError, match="moving averages do not go together"):
        hvdtrain.Trainer(make_model(), optimizer=keras.optimizers.SGD(use_ema=True), loss="mse", nan_policy="skip")
    with pytest.raises(ValueError, match="loss scaling and accumulate do not go together"):
        hvdtrain.Trainer(make_model(), optimizer="sgd", loss="mse", nan_policy="skip", precision="fp16", accumulate=2)


def test_checkpoints_may_leave_frozen_weights_out_but_no_statistics(tmp_path):
    def model(seed=0):
        keras.utils.set_random_seed(seed)
        base = keras.layers.Dense(4, trainable=False)
        return keras.Sequential([keras.Input((4,)), base, keras.layers.BatchNormalization(), keras.layers.Dense(1)])

    def fit(net, epochs, folder):
        run = hvdtrain.Trainer(net, optimizer=keras.optimizers.Adam(0.05), loss="mse")
        x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
        saved = hvdtrain.callbacks.Checkpoint(folder, frozen=False)
        run.fit((x, x[:, :1]), epochs=epochs, batch_size=4, callbacks=[saved], progress=False, run_dir=None)

    straight, resumed = model(), model()
    fit(straight, 2, tmp_path / "straight")
    fit(model(), 1, tmp_path / "resumed")
    fit(resumed, 2, tmp_path / "resumed")
    assert all(map(np.array_equal, straight.get_weights(), resumed.get_weights()))
    held = load_file(tmp_path / "resumed" / "epoch-000002" / "model.safetensors")
    assert [name.partition(".")[0] for name in sorted(held)] == [f"{index:05d}" for index in range(2, 8)]
    with pytest.raises(hvdtrain.errors.CheckpointError, match="holds no frozen weights"):
        fit(model(seed=1), 3, tmp_path / "resumed")


def test_a_resumed_run_takes_the_checkpoints_rate_or_on_request_the_scripts(tmp_path):
    def run(rate, epochs, override=()):
        trainer = hvdtrain.Trainer(make_model(), optimizer=keras.optimizers.SGD(rate), loss="mse")
        fit(trainer, epochs=epochs, checkpoint_dir=tmp_path, override=override)
        return trainer.learning_rate, [line for line in trainer.decisions if "script" in line]

    assert run(0.5, 1) == (0.5, [])
    kept = "lr 0.5: the checkpoint's, not the script's 0.25; fit(override=[\"lr\"]) takes the script's"
    assert run(0.25, 2) == (0.5, [kept])
    assert run(0.25, 3, ["lr"]) == (0.25, ["lr 0.5 -> 0.25: the script's, by override"])
    assert run(0.25, 4, ["lr"]) == (0.25, [])
    with pytest.raises(ValueError, match=r"among \['lr'\]. Received: override=\['momentum'\]"):
        run(0.25, 5, ["momentum"])
