"""What one process can prove of a fit: its parts in order, its sums exact, its exchanges few."""

from __future__ import annotations

import os
import re
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import Callback, EarlyStopping
from hvdtrain.checkpoint.store import Store
from hvdtrain.data.reading import as_source
from hvdtrain.distributed import elastic, world
from hvdtrain.training import preemption

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3

HorovodInternalError = type("HorovodInternalError", (RuntimeError,), {})


def test_early_stopping_bears_its_patience_and_restores_the_best_weights(make, net):
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


def test_the_best_weights_come_back_where_epochs_end_and_a_longer_run_has_the_last(make, net, tmp_path):
    scores, kept = [3.0, 1.0, 2.0, 2.0, 2.5], {}

    class Script(Callback):
        def on_epoch_end(self, trainer, epoch, logs):
            logs["score"] = scores[epoch]
            kept.setdefault(epoch, trainer.model[0].weight.detach().clone())

    def fit(epochs, folder=tmp_path):
        stopping = EarlyStopping("score", patience=9, mode="min", restore_best=True)
        trainer = make(net())
        options = {"callbacks": [Script(), stopping], "checkpoint_dir": folder, "run_dir": None, "progress": False}
        trainer.fit((X, Y), epochs=epochs, **options)
        return trainer.model[0].weight

    torch.manual_seed(0)
    for epochs in (4, 4, 5):  # from the beginning, with nothing left to train, and longer
        assert torch.equal(fit(epochs), kept[1])
    resumed = kept[4]
    kept.clear()
    torch.manual_seed(0)
    fit(5, folder=None)
    assert torch.equal(resumed, kept[4])


def test_the_parts_of_a_fit_come_in_order(make):
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

        def on_validation_begin(self, trainer):
            seen.append("validation begin")

        def on_validation_end(self, trainer, logs):
            seen.append(f"validation end {sorted(logs)}")

        def on_epoch_end(self, trainer, epoch, logs):
            assert logs["val_loss"] > 0
            seen.append(f"epoch {epoch} end")

        def on_training_end(self, trainer):
            seen.append("training end")

        def on_fit_end(self, trainer):
            seen.append("fit end")

    make().fit((X, Y), validation=(X, Y), epochs=1, batch_size=6, callbacks=[Watch()], progress=False)
    steps = ["step 0 begin", "step 0 end", "step 1 begin", "step 1 end"]
    validation = ["validation begin", "validation end ['val_loss']"]
    assert seen == ["fit begin", "epoch 0 begin", *steps, *validation, "epoch 0 end", "training end", "fit end"]


def test_the_progress_line_says_epoch_metrics_and_speed(make, capsys):
    make(metrics=["accuracy"]).fit((X, Y), validation=(X, Y), epochs=1)
    line, summary = capsys.readouterr().out.splitlines()
    assert line.startswith("epoch 1/1  loss ")
    for part in ("accuracy", "val_loss", "val_accuracy", "samples/s"):
        assert part in line
    parts = r"compute \d+ %, data \d+ %, other \d+ %"
    assert re.fullmatch(rf"trained for \d+ s: a step [\d.,]+ ms, {parts}", summary), summary


def test_a_mean_over_classes_weighs_targets_and_not_batches(make, net):
    """CrossEntropyLoss with ignore_index divides by the targets that count: so must accumulated batches."""
    targets = np.where(np.arange(12) < 5, -100, Y)
    whole, parts = net(), net()
    parts.load_state_dict(whole.state_dict())
    make(whole).fit((X, targets), epochs=2, batch_size=12, progress=False)
    make(parts, accumulate=4).fit((X, targets), epochs=2, batch_size=3, progress=False)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_the_rate_is_set_once_where_an_epochs_length_is_unknown(make, net):
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
    trainer.model_optimizer = trainer._adapter._update.optimizer
    trainer.fit(Stream(), epochs=2, batch_size=6, callbacks=[Decay()], progress=False)
    assert seen == pytest.approx([0.2, 0.2, 0.01, 0.01])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_reported_loss_does_not_depend_on_the_batch_size(make, reduction):
    trainer = make(loss=torch.nn.CrossEntropyLoss(reduction=reduction))
    losses = [trainer.evaluate((X, Y), batch_size=batch_size)["loss"] for batch_size in (12, 5, 1)]
    assert losses == pytest.approx([losses[0]] * 3)


def test_many_samples_are_counted_exactly_in_low_precision(make, net):
    model = net().bfloat16()
    x = torch.zeros(514, 4, dtype=torch.bfloat16)
    rows = torch.utils.data.TensorDataset(x, torch.zeros(514, dtype=torch.long))
    rows = torch.utils.data.DataLoader(rows, batch_size=257)
    trainer = make(model)
    trainer.evaluate(rows, batch_size=257)
    sums = []
    for batch in as_source(rows, batch_size=257, world=trainer.world).epoch(0, shuffle=False):
        trainer._adapter.eval_step(batch)
    trainer._adapter.metrics(lambda local: sums.append(local) or local)
    assert sums[0][1] == 514


def test_the_effective_batch_that_is_told_is_the_loaders_own(make, capsys):
    trainer = make(accumulate=2)
    rows = torch.utils.data.TensorDataset(torch.as_tensor(X), torch.as_tensor(Y))
    trainer.fit(torch.utils.data.DataLoader(rows, batch_size=3), epochs=1, run_dir=None)
    assert trainer.decisions == ["effective batch 6 samples (3 x 1 rank x 2 accumulated)"]
    assert capsys.readouterr().out.startswith(trainer.decisions[0])


def test_predict_takes_a_list_of_samples_as_fit_does(make):
    trainer = make()
    samples = [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(X[:5], Y[:5], strict=True)]
    np.testing.assert_array_equal(trainer.predict(samples, batch_size=2), trainer.predict(X[:5], batch_size=2))


def test_predict_takes_several_inputs_and_refuses_shares(make):
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


def test_a_double_model_takes_double_arrays(make, net):
    model = net().double()
    make(model).fit((X.astype(np.float64), Y), progress=False)
    assert model[0].weight.dtype == torch.float64


def test_the_seed_is_inits_unless_given(make):
    world.current().seed = 7
    assert make()._config["seed"] == 7
    assert make(seed=np.int64(3))._config["seed"] == 3
    with pytest.raises(ValueError, match="seed=-1"):
        make(seed=-1)


def test_an_epoch_takes_two_exchanges_whatever_its_length(make):
    """Besides a fit's own: as it begins and ends, and what ranks tell each other about once a second."""
    exchanged = []

    class Counting(world.SoloWorld):
        def allreduce(self, array, op="sum", *, name="host", process_set=None):
            if name != "running":
                exchanged.append(name)
            return super().allreduce(array, op, name=name, process_set=process_set)

    for rows in (1, 12):
        world.use(Counting())
        exchanged.clear()
        history = make().fit((X[:rows], Y[:rows]), epochs=3, batch_size=2, progress=False)
        assert exchanged == ["stop", *["metrics", "stop"] * 3, "stop"]
        assert all(seconds > 0 for seconds in history["seconds"])


@pytest.mark.skipif(elastic._horovod is None, reason="only Horovod's driver makes a job elastic")
@pytest.mark.parametrize("moment", ["as a round ends", "between rounds", "as a round begins"])
def test_a_stop_that_is_asked_around_a_rounds_end_comes_after_the_next_ones_first_step(
    make, monkeypatch, tmp_path, moment
):
    import hvdtrain.torch.elastic

    missed, rounds = [], []

    def ask():
        os.kill(os.getpid(), signal.SIGTERM)

    class Fails(Callback):
        def on_fit_begin(self, trainer):
            rounds.append("begun")

        def on_step_end(self, trainer, step):
            if len(rounds) == 1 and step == 2:
                if moment == "as a round ends":
                    ask()
                raise HorovodInternalError("as in a collective, a rank having died")

    class Asking(world.SoloWorld):
        def allgather_object(self, obj, *, name="object"):
            if name == "hosts" and rounds and moment == "as a round begins":
                ask()
            return super().allgather_object(obj, name=name)

    manager = SimpleNamespace(init=list, register_listener=id, remove_listener=id)
    monkeypatch.setattr(elastic, "_horovod", SimpleNamespace(notification_manager=manager))
    reset = ask if moment == "between rounds" else list
    monkeypatch.setattr(hvdtrain.torch.elastic, "reset", reset)
    world.use(Asking())
    trainer = make()
    trainer._elastic = True
    before = signal.signal(signal.SIGTERM, lambda number, frame: missed.append(number))
    try:
        with pytest.raises(SystemExit) as ending:
            trainer.fit((X, Y), epochs=2, batch_size=2, callbacks=[Fails()], checkpoint_dir=tmp_path, progress=False)
    finally:
        ours = signal.signal(signal.SIGTERM, before)
    assert ending.value.code == preemption.EXIT_CODE
    assert not missed
    assert rounds == ["begun"] * 2
    assert Store(tmp_path).newest_whole()[1].meta["position"]["global_step"] == 1
    ours(signal.SIGTERM, None)
    assert missed, "whose it was before fit has it again"
