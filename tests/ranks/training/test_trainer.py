"""The Trainer's promises on real ranks, the same tests for torch and every Keras backend."""

from __future__ import annotations

import json

import numpy as np
import pytest

import hvdtrain
from hvdtrain import checkpoint
from hvdtrain.data import sharding
from hvdtrain.errors import DesyncError, HvdTrainError

BATCH = 4


def data(num_samples, seed=1):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(num_samples, 6)).astype(np.float32)
    return x, generator.integers(0, 3, num_samples)


def one_process_groups(x, y, *, size, epochs, accumulate=1, seed=0):
    """The samples of each optimizer step, as one process with batches of size * BATCH takes them."""
    for epoch in range(epochs):
        order = sharding.epoch_order(len(x), epoch=epoch, seed=seed)
        per_step = BATCH * size * accumulate
        for begin in range(0, len(x), per_step):
            rows = order[begin : begin + per_step]
            yield [(x[rows], y[rows])]


def assert_equal_on_all_ranks(world, arrays):
    flat = np.concatenate([np.asarray(a).reshape(-1) for a in arrays])
    everybody = world.allgather(flat[None])
    assert (everybody == everybody[0]).all()


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    ("num_samples", "accumulate", "clip_norm"),
    [
        *[(num_samples, 1, None) for num_samples in (48, 50)],
        pytest.param(53, 1, None, marks=pytest.mark.every_backend),  # without clipping, which hides a wrong factor
        pytest.param(50, 3, 0.05, marks=pytest.mark.every_backend),
        *[(num_samples, 3, 0.05) for num_samples in (48, 53)],
    ],
)
def test_ranks_train_the_weights_of_one_process(kit, world, num_samples, accumulate, clip_norm):
    x, y = data(num_samples)
    net, reference = kit.model(seed=world.rank), kit.model(seed=0)
    trainer = kit.trainer(net, accumulate=accumulate, clip_norm=clip_norm)
    trainer.fit((x, y), epochs=3, batch_size=BATCH, progress=False)
    kit.optimizer_steps(
        reference, one_process_groups(x, y, size=world.size, epochs=3, accumulate=accumulate), clip_norm=clip_norm
    )
    for ours, theirs in zip(kit.weights(net), kit.weights(reference), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    assert_equal_on_all_ranks(world, kit.weights(net))


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("num_samples", [pytest.param(1, marks=pytest.mark.every_backend), 2])
def test_fewer_samples_than_ranks_train_as_one_process(kit, world, num_samples):
    x, y = data(num_samples)
    net, reference = kit.model(), kit.model()
    history = kit.trainer(net).fit((x, y), epochs=2, batch_size=BATCH, progress=False)
    kit.optimizer_steps(reference, one_process_groups(x, y, size=world.size, epochs=2))
    for ours, theirs in zip(kit.weights(net), kit.weights(reference), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    assert np.isfinite(history["loss"]).all()


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("num_samples", [2, pytest.param(50, marks=pytest.mark.every_backend)])
def test_metrics_are_exact_over_all_ranks(kit, world, num_samples):
    x, y = data(num_samples)
    net = kit.model()
    logits = kit.outputs(net, x).astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    result = kit.trainer(net).evaluate((x, y), batch_size=BATCH)
    assert result["loss"] == pytest.approx(-log_p[np.arange(len(y)), y].mean(), abs=1e-5)
    assert result["accuracy"] == pytest.approx((logits.argmax(1) == y).mean(), abs=1e-7)


@pytest.mark.world_size(2, 3)
def test_evaluating_before_fit_runs_the_roots_model_on_every_rank(kit, world):
    x, y = data(12)
    ours, roots = kit.trainer(kit.model(seed=world.rank)), kit.trainer(kit.model(seed=0))
    assert ours.evaluate((x, y))["loss"] == pytest.approx(roots.evaluate((x, y))["loss"], abs=1e-6)


@pytest.mark.every_backend
@pytest.mark.world_size(2, 3)
def test_training_metrics_count_every_sample_once(kit, world):
    x, y = data(50)
    net = kit.model()
    kit.set_first_weight(net, 0.0)
    optimizer_free = kit.trainer(net)
    expected = optimizer_free.evaluate((x, y), batch_size=50)
    # One step over everything: the metrics of that epoch are those of the weights it began with.
    history = optimizer_free.fit((x, y), epochs=1, batch_size=50, progress=False)
    assert history["loss"][0] == pytest.approx(expected["loss"], abs=1e-5)
    assert history["accuracy"][0] == pytest.approx(expected["accuracy"], abs=1e-7)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("num_samples", [1, 2, pytest.param(17, marks=pytest.mark.every_backend)])
def test_predict_returns_everything_in_input_order_on_every_rank(kit, world, num_samples):
    x, _ = data(num_samples)
    net = kit.model()
    predicted = kit.trainer(net).predict(x, batch_size=3)
    np.testing.assert_allclose(predicted, kit.outputs(net, x), atol=1e-6)


@pytest.mark.on_keras
@pytest.mark.world_size(2)
def test_gradients_really_travel(kit, world, shared_tmp_path):
    x, y = data(32)
    net = kit.model()
    path = shared_tmp_path / "timeline.json"
    kit.timeline().start_timeline(str(path))
    kit.trainer(net).fit((x, y), epochs=1, batch_size=BATCH, progress=False)
    kit.timeline().stop_timeline()
    world.barrier()
    if world.is_root:
        text = path.read_text().rstrip().rstrip(",")
        events = json.loads(text if text.endswith("]") else text + "]")
        names = {e["pid"]: e["args"].get("name", "") for e in events if e.get("name") == "process_name"}
        reduced = [names[e["pid"]] for e in events if e.get("name") == "ALLREDUCE" and e["ph"] == "B"]
        gradients = [name for name in reduced if "hvdtrain." not in name]
        # 32 samples are 4 steps of 2 * 4, and every step sends something of the model's four tensors.
        assert len(gradients) >= 4, reduced


@pytest.mark.world_size(2, 3)
def test_history_is_equal_on_every_rank(kit, world):
    x, y = data(50)
    history = kit.trainer(kit.model()).fit((x, y), validation=(x, y), epochs=2, batch_size=BATCH, progress=False)
    assert set(history) >= {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert all(len(values) == 2 for values in history.values())
    everybody = world.allgather_object(history)
    assert all(each == everybody[0] for each in everybody)


@pytest.mark.every_backend
@pytest.mark.world_size(2, 3)
def test_linear_scaling_warms_up_step_by_step_and_then_lets_go(kit, world):
    seen = []

    class Watch(hvdtrain.callbacks.Callback):
        def on_step_end(self, trainer, step):
            seen.append(trainer._adapter.learning_rates[0])

    x, y = data(BATCH * world.size * 4)
    trainer = kit.trainer(kit.model(), lr_scaling="linear", warmup_epochs=1)
    trainer.fit((x, y), epochs=2, batch_size=BATCH, callbacks=[Watch()], progress=False)
    size = world.size
    ramp = [kit.LR * (1 + (size - 1) * step / 4) for step in (1, 2, 3, 4)]
    np.testing.assert_allclose(seen, ramp + [kit.LR * size] * 4, rtol=1e-6)


@pytest.mark.world_size(2)
def test_the_learning_rate_is_never_scaled_unasked(kit, world):
    trainer = kit.trainer(kit.model())
    trainer.fit(data(16), epochs=1, batch_size=BATCH, progress=False)
    assert trainer._adapter.learning_rates == pytest.approx([kit.LR])


@pytest.mark.world_size(2, 3)
def test_ranks_that_disagree_on_the_model_say_which_parameter(kit, world):
    net = kit.model(hidden=16 if world.rank == 0 else 17)
    with pytest.raises(DesyncError, match=r"16|17"):
        kit.trainer(net).fit(data(16), epochs=1, batch_size=BATCH, progress=False)


@pytest.mark.world_size(2)
def test_ranks_that_disagree_on_options_or_data_say_so(kit, world):
    with pytest.raises(DesyncError, match="accumulate"):
        kit.trainer(kit.model(), accumulate=1 + world.rank)
    with pytest.raises(DesyncError, match="number of samples"):
        kit.trainer(kit.model()).fit(data(16 + world.rank), epochs=1, batch_size=BATCH, progress=False)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("call", ["fit", "evaluate", "predict", "prepare"])
def test_ranks_that_each_pass_a_part_of_their_own_are_told_so(kit, world, call):
    x, y = (each[world.rank :: world.size] for each in data(24))
    net = kit.model()
    calls = {
        "fit": lambda: kit.trainer(net).fit((x, y), batch_size=BATCH),
        "evaluate": lambda: kit.trainer(net).evaluate((x, y), batch_size=BATCH),
        "predict": lambda: kit.trainer(net).predict(x),
        "prepare": lambda: kit.prepare_arrays(net, x, y),
    }
    with pytest.raises(DesyncError, match="first sample"):
        calls[call]()


@pytest.mark.world_size(2)
def test_data_that_fails_on_one_rank_fails_on_all(kit, world):
    x, y = data(8)
    with pytest.raises((ValueError, HvdTrainError), match=r"one row per sample.*rank 1"):
        kit.trainer(kit.model()).fit((x, y[: 8 - world.rank]), progress=False)


@pytest.mark.world_size(2)
def test_a_restored_rate_gets_the_scaling_of_the_present_ranks(kit, world, shared_tmp_path):
    options = {"epochs": 1, "batch_size": BATCH, "progress": False, "checkpoint_dir": str(shared_tmp_path)}
    kit.trainer(kit.model(), lr_scaling="linear").fit(data(16), **options)
    if world.is_root:  # as if four ranks had written it
        contents = checkpoint.read(shared_tmp_path / "epoch-000001")
        contents.meta["world_size"] = 4
        checkpoint.write(shared_tmp_path / "epoch-000001", contents)
    world.barrier()
    trainer = kit.trainer(kit.model(), lr_scaling="linear")
    trainer.fit(data(16), **{**options, "epochs": 2})
    assert trainer._adapter.learning_rates == pytest.approx([kit.LR * 2 * 2 / 4])


@pytest.mark.world_size(2)
def test_ranks_that_end_with_different_weights_are_found(kit, world):
    net = kit.model()

    class Sabotage(hvdtrain.callbacks.Callback):
        def on_fit_end(self, trainer):
            if trainer.world.rank == 1:
                kit.set_first_weight(net, 0.5)

    with pytest.raises(DesyncError, match="weights"):
        kit.trainer(net).fit(data(16), epochs=1, batch_size=BATCH, callbacks=[Sabotage()], progress=False)


@pytest.mark.every_backend
@pytest.mark.world_size(2, 3)
def test_running_statistics_are_their_mean_over_ranks_after_fit(kit, world):
    net, statistics = kit.batch_norm_model()
    own = []

    class Remember(hvdtrain.callbacks.Callback):
        def on_step_end(self, trainer, step):
            own[:] = [np.array(each) for each in statistics()]

    kit.trainer(net).fit(data(50), epochs=2, batch_size=BATCH, callbacks=[Remember()], progress=False)
    assert_equal_on_all_ranks(world, statistics())
    for averaged, mine in zip(statistics(), own, strict=True):
        ranks = world.allgather(mine[None].astype(np.float64))
        assert np.abs(ranks[0] - ranks[1]).max() > 1e-4  # each saw samples of its own
        np.testing.assert_allclose(averaged, ranks.mean(0), rtol=1e-5)


@pytest.mark.on_keras
@pytest.mark.world_size(2, 3)
def test_iterables_of_unequal_length_neither_hang_nor_lose_samples(kit, world):
    x, y = data(40)
    begin = [0, 4, 15, 40][world.rank]
    end = 40 if world.rank == world.size - 1 else [0, 4, 15, 40][world.rank + 1]
    mine = kit.unequal_iterable(x[begin:end], y[begin:end], rank=world.rank)
    counted = []

    class Count(hvdtrain.callbacks.Callback):
        def on_epoch_end(self, trainer, epoch, logs):
            counted.append(round(logs["samples_per_s"] * logs["seconds"]))

    net = kit.model()
    kit.trainer(net).fit(hvdtrain.Sharded(mine), epochs=2, batch_size=BATCH, callbacks=[Count()], progress=False)
    assert counted == [40, 40]
    assert_equal_on_all_ranks(world, kit.weights(net))


@pytest.mark.world_size(2, 3)
def test_iterables_are_shared_out_batch_by_batch(kit, world):
    x, y = data(42)
    counted = []

    class Count(hvdtrain.callbacks.Callback):
        def on_epoch_end(self, trainer, epoch, logs):
            counted.append(round(logs["samples_per_s"] * logs["seconds"]))

    data_of_all = kit.unequal_iterable(x, y, rank=world.rank)
    kit.trainer(kit.model()).fit(data_of_all, epochs=1, batch_size=BATCH, callbacks=[Count()], progress=False)
    assert counted == [42]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.on_keras), "fp16"])
def test_lower_precision_trains_and_keeps_ranks_equal(kit, world, precision):
    x, y = data(64)
    y = (x[:, 0] > 0).astype(np.int64)
    net = kit.model()
    history = kit.trainer(net, precision=precision, clip_norm=1.0).fit(
        (x, y), epochs=8, batch_size=BATCH, progress=False
    )
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    assert_equal_on_all_ranks(world, kit.weights(net))


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("compression", [pytest.param("fp16", marks=pytest.mark.on_keras), "bf16"])
def test_compression_changes_rounding_only(kit, world, compression):
    x, y = data(50)
    net, reference = kit.model(), kit.model()
    kit.trainer(net, compression=compression).fit((x, y), epochs=2, batch_size=BATCH, progress=False)
    kit.optimizer_steps(reference, one_process_groups(x, y, size=world.size, epochs=2))
    for ours, theirs in zip(kit.weights(net), kit.weights(reference), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-2)
    assert_equal_on_all_ranks(world, kit.weights(net))


@pytest.mark.world_size(2, 3)
def test_a_resumed_run_ends_as_if_it_never_stopped(kit, world, shared_tmp_path):
    x, y = data(50)
    options = {"batch_size": BATCH, "progress": False}
    straight, stopped, resumed = kit.model(), kit.model(), kit.model(seed=5)
    whole = kit.trainer(straight).fit((x, y), epochs=3, **options)
    kit.trainer(stopped).fit((x, y), epochs=2, checkpoint_dir=str(shared_tmp_path), **options)
    history = kit.trainer(resumed).fit((x, y), epochs=3, checkpoint_dir=str(shared_tmp_path), **options)
    for ours, theirs in zip(kit.weights(resumed), kit.weights(straight), strict=True):
        assert (ours == theirs).all()
    assert history["loss"] == whole["loss"]


@pytest.mark.world_size(2)
def test_a_damaged_checkpoint_is_skipped_and_an_older_one_taken(kit, world, shared_tmp_path):
    x, y = data(16)
    options = {"batch_size": BATCH, "progress": False, "checkpoint_dir": str(shared_tmp_path)}
    kit.trainer(kit.model()).fit((x, y), epochs=2, **options)
    if world.is_root:
        victim = shared_tmp_path / "epoch-000002" / "model.safetensors"
        victim.write_bytes(victim.read_bytes()[:-1])
    world.barrier()
    history = kit.trainer(kit.model()).fit((x, y), epochs=3, **options)
    assert len(history["loss"]) == 3


@pytest.mark.on_keras
@pytest.mark.world_size(2)
def test_a_checkpoint_of_another_model_names_the_tensor_on_every_rank(kit, world, shared_tmp_path):
    trainer = kit.trainer(kit.model())
    trainer.fit(data(16), epochs=1, batch_size=BATCH, progress=False)
    trainer.save(str(shared_tmp_path / "one"))
    other = kit.model(hidden=5)
    options = {"optimizer": kit.optimizer_of(other), "loss": kit.loss()}
    with pytest.raises(HvdTrainError, match=r"tensor .*0.* is .*16.* in the checkpoint and .*5.* in the model"):
        hvdtrain.Trainer.load(str(shared_tmp_path / "one"), other, **options)
    with pytest.raises(HvdTrainError, match="No such file"):
        hvdtrain.Trainer.load(str(shared_tmp_path / "none"), other, **options)


@pytest.mark.on_keras
@pytest.mark.world_size(2)
def test_weights_alone_begin_another_training(kit, world, shared_tmp_path):
    x, y = data(16)
    options = {"batch_size": BATCH, "progress": False, "run_dir": None}
    before = kit.model()
    kit.trainer(before, clip_norm=0.1).fit((x, y), epochs=2, checkpoint_dir=str(shared_tmp_path), **options)
    net = kit.model(seed=5 + world.rank)
    given = {"optimizer": kit.adam_of(net), "loss": kit.loss(), "weights_only": True}
    loaded = hvdtrain.Trainer.load(str(shared_tmp_path / "epoch-000002"), net, **given)
    for ours, theirs in zip(kit.weights(net), kit.weights(before), strict=True):
        assert (ours == theirs).all()
    assert (loaded.global_step, dict(loaded.history), loaded.config["clip_norm"]) == (0, {}, None)
    assert len(loaded.fit((x, y), epochs=3, **options)["loss"]) == 3


@pytest.mark.world_size(2, 3)
def test_one_rank_is_enough_to_stop_all_after_the_epoch(kit, world):
    class StopOnLast(hvdtrain.callbacks.Callback):
        def on_epoch_end(self, trainer, epoch, logs):
            if trainer.world.rank == trainer.world.size - 1 and epoch == 1:
                trainer.stop()

    history = kit.trainer(kit.model()).fit(
        data(16), epochs=5, batch_size=BATCH, callbacks=[StopOnLast()], progress=False
    )
    assert len(history["loss"]) == 2
