"""What a Trainer refuses, each with a message that shows what it was given; and what one process can prove."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain import world
from hvdtrain.callbacks import Callback, EarlyStopping
from hvdtrain.errors import CheckpointError, HvdTrainError

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3


@pytest.fixture(autouse=True)
def solo():
    world.use(world.SoloWorld())
    yield
    world.use(None)


def net(outputs=3):
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, outputs))


def make(model=None, **options):
    model = model or net()
    if "optimizer" not in options:
        options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    options.setdefault("loss", torch.nn.CrossEntropyLoss())
    return hvdtrain.Trainer(model, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision must be one of fp32, bf16, fp16. Received: precision='fp8'"),
        ({"compression": "zip"}, "compression='zip'"),
        ({"lr_scaling": "cubic"}, "lr_scaling='cubic'"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"clip_norm": -1.0}, r"clip_norm=-1\.0"),
        ({"warmup_epochs": -1}, "warmup_epochs=-1"),
        ({"metrics": ["acuracy"]}, "'acuracy'"),
    ],
)
def test_an_option_outside_its_range_is_shown(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize("model", [object(), "resnet", None])
def test_a_model_of_no_known_framework_is_shown(model):
    with pytest.raises(TypeError, match=r"a torch\.nn\.Module or a keras\.Model\. Received: "):
        hvdtrain.Trainer(model)


def test_a_model_without_trainable_parameters_is_refused():
    frozen = net().requires_grad_(False)
    for model in (torch.nn.Flatten(), frozen):
        with pytest.raises(ValueError, match="no trainable parameters"):
            make(model, optimizer=torch.optim.SGD(net().parameters(), lr=0.1))


def test_an_optimizer_over_other_parameters_is_refused():
    with pytest.raises(ValueError, match=r"model's own parameters.*group 0 with 4 others"):
        make(optimizer=torch.optim.SGD(net().parameters(), lr=0.1))


@pytest.mark.parametrize("wrong", [{"optimizer": "sgd"}, {"loss": "cross_entropy"}, {"loss": None}])
def test_an_optimizer_or_loss_that_is_not_torchs_is_shown(wrong):
    with pytest.raises(TypeError, match="Received: "):
        make(**wrong)


@pytest.mark.parametrize("batch_size", [0, -3, 2.5])
def test_a_batch_size_that_is_no_count_is_shown(batch_size):
    with pytest.raises(ValueError, match=f"batch_size={batch_size}"):
        make().fit((X, Y), batch_size=batch_size)


def test_no_data_is_refused():
    with pytest.raises(ValueError, match="no samples"):
        make().fit((X[:0], Y[:0]))


def test_labels_of_another_length_are_shown():
    with pytest.raises(ValueError, match="'inputs': 12, 'targets': 11"):
        make().fit((X, Y[:-1]))


@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        (torch.nn.CrossEntropyLoss(), Y[:, None], r"class indices of shape \(12,\).*targets \(12, 1\) on rank 0"),
        (torch.nn.CrossEntropyLoss(), Y + 1, r"Class indices must be in \[0, 3\). Received: 1 to 3"),
        (torch.nn.MSELoss(), X[:, 0], r"outputs' shape. Received: outputs \(12, 3\), targets \(12,\)"),
    ],
)
def test_labels_of_the_wrong_shape_are_shown_before_they_are_broadcast(loss, targets, message):
    with pytest.raises(ValueError, match=message):
        make(loss=loss).fit((X, targets), batch_size=12)


def test_warmup_over_data_of_unknown_length_is_refused():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(zip(X, Y, strict=True))

    with pytest.raises(ValueError, match="length is known"):
        make(warmup_epochs=1).fit(Stream())


def test_a_stream_that_can_be_iterated_once_is_an_error_in_its_second_epoch():
    class Once(torch.utils.data.IterableDataset):
        items = iter(list(zip(X, Y, strict=True)))

        def __iter__(self):
            return self.items

    with pytest.raises(ValueError, match=r"epoch 1.*iterated anew"):
        make().fit(Once(), epochs=2, progress=False)


def test_predicting_from_a_stream_is_refused():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(X)

    with pytest.raises(TypeError, match="map-style"):
        make().predict(Stream())


def test_monitoring_an_unknown_metric_names_the_known_ones():
    with pytest.raises(ValueError, match=r"\['loss', 'samples_per_s', 'seconds'\].*'val_loss'"):
        make().fit((X, Y), callbacks=[EarlyStopping()], progress=False)


def test_early_stopping_bears_its_patience_and_restores_the_best_weights():
    values = iter([3.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    model = net()
    kept = {}

    class Script(Callback):
        def on_epoch_end(self, trainer, epoch, logs):
            logs["score"] = next(values)
            kept[epoch] = model[0].weight.detach().clone()

    stopping = EarlyStopping("score", patience=1, mode="min", restore_best=True)
    history = make(model).fit((X, Y), epochs=6, callbacks=[Script(), stopping], progress=False)
    assert len(history["loss"]) == 4
    assert torch.equal(model[0].weight, kept[1])


def test_something_that_is_no_callback_is_refused():
    with pytest.raises(TypeError, match="callback must be"):
        make().fit((X, Y), callbacks=[print])


def test_the_ten_parts_of_a_fit_come_in_order():
    seen = []

    class Watch(Callback):
        def on_fit_begin(self, trainer):
            seen.append("fit begin")

        def on_epoch_begin(self, trainer, epoch):
            seen.append(f"epoch {epoch} begin")

        def on_step_begin(self, trainer, step):
            seen.append(f"step {step} begin")

        def on_step_end(self, trainer, step):
            seen.append(f"step {step} end")

        def on_epoch_end(self, trainer, epoch, logs):
            seen.append(f"epoch {epoch} end")

        def on_fit_end(self, trainer):
            seen.append("fit end")

    make().fit((X, Y), epochs=1, batch_size=6, callbacks=[Watch()], progress=False)
    steps = ["step 0 begin", "step 0 end", "step 1 begin", "step 1 end"]
    assert seen == ["fit begin", "epoch 0 begin", *steps, "epoch 0 end", "fit end"]


def test_the_progress_line_says_epoch_metrics_and_speed(capsys):
    make(metrics=["accuracy"]).fit((X, Y), validation=(X, Y), epochs=1)
    line = capsys.readouterr().out
    assert line.startswith("epoch 1/1  loss ")
    for part in ("accuracy", "val_loss", "val_accuracy", "samples/s"):
        assert part in line


def test_a_mean_over_classes_weighs_targets_and_not_batches():
    """CrossEntropyLoss with ignore_index divides by the targets that count: so must accumulated batches."""
    targets = np.where(np.arange(12) < 5, -100, Y)
    whole, parts = net(), net()
    parts.load_state_dict(whole.state_dict())
    make(whole).fit((X, targets), epochs=2, batch_size=12, progress=False)
    make(parts, accumulate=4).fit((X, targets), epochs=2, batch_size=3, progress=False)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_what_the_user_passed_in_stays_theirs():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make(model, optimizer=optimizer).fit((X, Y), progress=False)
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_save_and_load_go_on_where_it_stopped(tmp_path):
    model = net()
    straight = copy.deepcopy(model)
    trainer = make(model, optimizer=torch.optim.Adam(model.parameters()))
    trainer.fit((X, Y), epochs=2, progress=False)
    trainer.save(str(tmp_path / "one"))
    other = net()
    adam = torch.optim.Adam(other.parameters())
    loaded = hvdtrain.Trainer.load(str(tmp_path / "one"), other, optimizer=adam, loss=torch.nn.CrossEntropyLoss())
    history = loaded.fit((X, Y), epochs=3, progress=False)
    assert len(history["loss"]) == 3
    make(straight, optimizer=torch.optim.Adam(straight.parameters())).fit((X, Y), epochs=3, progress=False)
    for one, two in zip(straight.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_checkpoint_loads_in_plain_torch(tmp_path):
    from safetensors.numpy import load_file

    trainer = make()
    trainer.save(str(tmp_path / "one"))
    arrays = load_file(tmp_path / "one" / "arrays.safetensors")
    plain = net()
    plain.load_state_dict({n[6:]: torch.from_numpy(a) for n, a in arrays.items() if n.startswith("model.")})
    assert torch.equal(plain[0].weight, trainer.model[0].weight)


def test_evaluating_within_an_epoch_is_refused_and_an_interrupted_epoch_leaves_nothing():
    class Peek(Callback):
        def on_step_end(self, trainer, step):
            trainer.evaluate((X, Y))

    trainer = make(metrics=["accuracy"])
    expected = trainer.evaluate((X, Y))
    with pytest.raises(HvdTrainError, match=r"middle of a training epoch.*on_epoch_end"):
        trainer.fit((X, Y), callbacks=[Peek()], batch_size=6, progress=False)
    trainer.model[0].weight.grad = None
    assert trainer.evaluate((X, Y)).keys() == expected.keys()
    history = trainer.fit((X[:6], Y[:6]), epochs=1, batch_size=6, progress=False)
    assert round(history["samples_per_s"][0] * history["seconds"][0]) == 6


def test_the_rate_is_set_once_where_an_epochs_length_is_unknown():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(zip(X, Y, strict=True))

    seen = []

    class Decay(Callback):
        def on_step_end(self, trainer, step):
            seen.append(trainer.model_optimizer.param_groups[0]["lr"])

        def on_epoch_end(self, trainer, epoch, logs):
            trainer.model_optimizer.param_groups[0]["lr"] = 0.01

    model = net()
    trainer = make(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), lr_scaling="linear", warmup_epochs=0)
    trainer._lr.factor = 2.0  # as on two ranks
    trainer.model_optimizer = trainer._adapter._optimizer
    trainer.fit(Stream(), epochs=2, batch_size=6, callbacks=[Decay()], progress=False)
    assert seen == pytest.approx([0.2, 0.2, 0.01, 0.01])


def test_a_loaded_state_is_the_callers_own():
    model = net()
    trainer = make(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    trainer.fit((X, Y), progress=False)
    state = trainer.state()
    before = {name: array.copy() for name, array in state.arrays.items()}
    trainer.load_state(state)
    trainer.fit((X, Y), progress=False)
    assert all((state.arrays[name] == array).all() for name, array in before.items())


def test_looking_at_the_state_to_check_or_save_it_copies_no_weights():
    model = net()
    trainer = make(model)
    weight = model[0].weight.detach().numpy()
    assert np.shares_memory(trainer._adapter.state().arrays["model.0.weight"], weight)
    assert not np.shares_memory(trainer.state().arrays["model.0.weight"], weight)


def test_a_distributed_optimizer_is_refused():
    import hvdtrain.torch as hvd

    hvd.init()
    model = net()
    with pytest.raises(ValueError, match="must be the plain one"):
        make(model, optimizer=hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_reported_loss_does_not_depend_on_the_batch_size(reduction):
    trainer = make(loss=torch.nn.CrossEntropyLoss(reduction=reduction))
    losses = [trainer.evaluate((X, Y), batch_size=batch_size)["loss"] for batch_size in (12, 5, 1)]
    assert losses == pytest.approx([losses[0]] * 3)


def test_many_samples_are_counted_exactly_in_low_precision():
    model = net().bfloat16()
    x = torch.zeros(514, 4, dtype=torch.bfloat16)
    rows = torch.utils.data.TensorDataset(x, torch.zeros(514, dtype=torch.long))
    rows = torch.utils.data.DataLoader(rows, batch_size=257)
    trainer = make(model)
    trainer.evaluate(rows, batch_size=257)
    sums = []
    for batch in trainer._source(rows, 257).epoch(0, shuffle=False):
        trainer._adapter.eval_step(batch)
    trainer._adapter.metrics(lambda local: sums.append(local) or local)
    assert sums[0][1] == 514


def test_resume_never_moves_older_checkpoints_aside(tmp_path):
    options = {"checkpoint_dir": str(tmp_path), "progress": False}
    make().fit((X, Y), epochs=3, **options)
    make().fit((X, Y), epochs=1, resume="never", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"epoch-000001", "old-1"}
    assert len(make().fit((X, Y), epochs=2, **options)["loss"]) == 2


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}])
def test_fp16_bears_a_checkpoint_of_fp32_and_batches_in_which_nothing_counts(tmp_path, options):
    make().save(str(tmp_path / "one"))
    model = net()
    trainer = hvdtrain.Trainer.load(
        str(tmp_path / "one"), model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.CrossEntropyLoss(), precision="fp16", **options,
    )  # fmt: skip
    before = model[0].weight.detach().clone()
    trainer.fit((X, np.full(12, -100)), progress=False)
    assert torch.equal(before, model[0].weight)


def test_a_checkpoint_of_another_optimizer_is_refused_before_anything_changes(tmp_path):
    make().save(str(tmp_path / "one"))
    model = net()
    before = model[0].weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"'SGD'.*'Adam'"):
        hvdtrain.Trainer.load(
            str(tmp_path / "one"), model, optimizer=torch.optim.Adam(model.parameters()), loss=torch.nn.MSELoss()
        )
    assert torch.equal(before, model[0].weight)


def test_early_stopping_knows_the_epochs_before_a_resume(tmp_path):
    class Worse(Callback):
        def on_epoch_end(self, trainer, epoch, logs):
            logs["score"] = float(epoch)
            trainer.history["score"] = [float(each) for each in range(epoch + 1)]

    options = {"checkpoint_dir": str(tmp_path), "progress": False}
    stopping = EarlyStopping("score", patience=2, mode="min")
    first = make().fit((X, Y), epochs=10, callbacks=[Worse(), stopping], **options)
    again = make().fit(
        (X, Y), epochs=10, callbacks=[Worse(), EarlyStopping("score", patience=2, mode="min")], **options
    )
    assert len(first["loss"]) == len(again["loss"]) == 4


def test_predict_takes_several_inputs_and_refuses_shares():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, pair):
            return self.layer(pair[0]) + self.layer(pair[1])

    trainer = make(Two())
    assert trainer.predict((X, X)).shape == (12, 2)
    with pytest.raises(TypeError, match="map-style"):
        trainer.predict(hvdtrain.Sharded(X))


def test_a_double_model_takes_double_arrays():
    model = net().double()
    make(model).fit((X.astype(np.float64), Y), progress=False)
    assert model[0].weight.dtype == torch.float64


def test_the_seed_is_inits_unless_given():
    world.current().seed = 7
    assert make()._config["seed"] == 7
    assert make(seed=np.int64(3))._config["seed"] == 3
    with pytest.raises(ValueError, match="seed=-1"):
        make(seed=-1)


def test_an_epoch_takes_two_exchanges_whatever_its_length():
    exchanged = []

    class Counting(world.SoloWorld):
        def allreduce(self, array, op="sum", *, name="host"):
            exchanged.append(name)
            return super().allreduce(array, op, name=name)

    for rows in (1, 12):
        world.use(Counting())
        exchanged.clear()
        history = make().fit((X[:rows], Y[:rows]), epochs=3, batch_size=2, progress=False)
        assert exchanged == ["stop", "metrics"] * 3
        assert all(seconds > 0 for seconds in history["seconds"])
