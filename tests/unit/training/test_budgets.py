"""Which limit ends a run, and what a run that ends within an epoch reports and leaves behind."""

from __future__ import annotations

import csv
import json
import os
import signal

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint, CSVLogger, EarlyStopping
from hvdtrain.checkpoint.store import Store
from hvdtrain.tools.report.reading import read_run
from hvdtrain.training import preemption

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3
TIMES = {"samples_per_s", "seconds"}


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield from zip(X, Y, strict=True)


class Watch(Callback):
    def __init__(self):
        self.ended, self.steps = [], 0

    def on_step_end(self, trainer, step):
        self.steps += 1

    def on_epoch_end(self, trainer, epoch, logs):
        self.ended.append((epoch, trainer.global_step))


def metrics(history):
    return {name: values for name, values in history.items() if name not in TIMES}


def fit(make, net, *callbacks, data=(X, Y), **options):
    """Return a fit's weights and metrics; each begins with the same weights."""
    torch.manual_seed(3)
    model = net()
    trainer = make(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    given = {"batch_size": 2, "progress": False, "run_dir": None} | options
    history = trainer.fit(data, callbacks=callbacks, **given)
    return [p.detach().clone() for p in model.parameters()], history


def assert_same(ours, theirs):
    assert all(torch.equal(one, other) for one, other in zip(ours[0], theirs[0], strict=True))
    assert metrics(ours[1]) == metrics(theirs[1])
    assert ours[1].validations == theirs[1].validations


@pytest.mark.parametrize(
    ("limits", "ended"),
    [
        ({}, [(0, 6)]),
        ({"epochs": 2}, [(0, 6), (1, 12)]),
        ({"steps": 4}, [(0, 4)]),
        ({"steps": 8}, [(0, 6), (1, 8)]),
        ({"steps": 12}, [(0, 6), (1, 12)]),
        ({"epochs": 1, "steps": 8}, [(0, 6)]),
        ({"epochs": 9, "steps": 8, "seconds": 600.0}, [(0, 6), (1, 8)]),
        ({"seconds": 1e-9}, [(0, 1)]),
    ],
)
def test_the_first_limit_that_is_reached_ends_the_run(make, net, limits, ended):
    watch = Watch()
    _, history = fit(make, net, watch, validation=(X, Y), **limits)
    assert watch.ended == ended
    assert watch.steps == ended[-1][1]
    assert len(history["loss"]) == len(history["val_loss"]) == len(ended)


def test_seconds_end_a_run_soon_after_them(make, net):
    class Slow(Callback):
        def on_step_end(self, trainer, step):
            torch.randn(1000, 1000).exp()

    _, history = fit(make, net, Slow(), data=Endless(), seconds=0.3)
    assert 0.3 <= history["seconds"][0] < 3


@pytest.mark.parametrize("parts", [[4, 9], [6, 9], [1, 2, 5, 9]])
@pytest.mark.parametrize("checkpoint", [{}, {"every_epochs": 0, "every_steps": 4}])
def test_a_run_in_parts_equals_a_straight_one(make, net, tmp_path, parts, checkpoint):
    options = {"validation": (X[:5], Y[:5])}
    straight = fit(make, net, steps=9, **options)
    for steps in parts:
        resumed = fit(make, net, Checkpoint(tmp_path, **checkpoint), steps=steps, **options)
    assert_same(resumed, straight)
    watch = Watch()
    assert_same(fit(make, net, Checkpoint(tmp_path), watch, steps=9, **options), straight)
    assert not watch.steps
    assert_same(fit(make, net, Checkpoint(tmp_path), epochs=3, **options), fit(make, net, epochs=3, **options))


def test_seconds_count_over_all_attempts(make, net, tmp_path):
    fit(make, net, Checkpoint(tmp_path), steps=4)
    watch = Watch()
    fit(make, net, Checkpoint(tmp_path), watch, seconds=1e-6)
    assert not watch.steps


def test_a_trainer_that_ended_within_an_epoch_saves_what_a_longer_run_needs(make, net, tmp_path):
    class Save(Callback):
        def on_fit_end(self, trainer):
            trainer.save(tmp_path / "four")

    straight = fit(make, net, steps=9)
    fit(make, net, Save(), steps=4, validation=(X, Y))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loaded = hvdtrain.Trainer.load(tmp_path / "four", model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())
    history = loaded.fit((X, Y), steps=9, batch_size=2, progress=False, run_dir=None)
    assert_same(([p.detach() for p in model.parameters()], history), straight)


def test_an_epoch_that_never_ends_has_its_checkpoints_by_steps(make, net, tmp_path):
    straight = fit(make, net, data=Endless(), steps=9, epochs=2)
    fit(make, net, Checkpoint(tmp_path, every_steps=2), data=Endless(), steps=5)
    assert [path.name for path in Store(tmp_path).newest_first()] == [
        f"epoch-000000-step-{step:08}" for step in (5, 4, 2)
    ]
    assert_same(fit(make, net, Checkpoint(tmp_path), data=Endless(), steps=9), straight)


class StoppedError(Exception):
    """Stands for a kill."""


class StopAt(Callback):
    def __init__(self, moment, step):
        self._moment, self._step = moment, step

    def _stop(self, trainer, moment):
        if (moment, trainer.global_step) == (self._moment, self._step):
            raise StoppedError

    def on_step_end(self, trainer, step):
        self._stop(trainer, "step")

    def on_validation_begin(self, trainer):
        self._stop(trainer, "before validation")

    def on_validation_end(self, trainer, logs):
        self._stop(trainer, "after validation")

    def on_epoch_end(self, trainer, epoch, logs):
        self._stop(trainer, "epoch")


SETS = {"clean": (X[:5], Y[:5]), "noisy": (X[5:], Y[5:])}


@pytest.mark.parametrize("every_steps", [1, pytest.param(5, marks=pytest.mark.long)])
def test_a_kill_at_any_place_resumes_bit_for_bit(make, net, tmp_path, every_steps):
    options = {"validation": SETS, "validate_every": 2, "steps": 9}
    straight = fit(make, net, **options)
    assert [each["global_step"] for each in straight[1].validations] == [2, 4, 6, 8]
    assert {"val_clean_loss", "val_noisy_loss"} < straight[1].keys()
    places = [(moment, step) for step in (4, 6, 9) for moment in ("before validation", "after validation")]
    places += [("step", 6), ("epoch", 6), ("epoch", 9)]
    for place in places:
        keep = Checkpoint(tmp_path / f"{place}", every_steps=every_steps, best="val_noisy_loss")
        with pytest.raises(StoppedError):
            fit(make, net, keep, StopAt(*place), **options)
        assert_same(fit(make, net, keep, **options), straight)


def test_validation_within_an_epoch_changes_nothing_of_training(make, net):
    def dropout():
        return torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)
        )

    rows = torch.utils.data.TensorDataset(torch.as_tensor(X), torch.as_tensor(Y))
    shuffled = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
    plain = fit(make, dropout, data=shuffled, steps=9)
    validated = fit(make, dropout, data=shuffled, steps=9, validation=shuffled, validate_every=5)
    assert all(torch.equal(one, other) for one, other in zip(plain[0], validated[0], strict=True))
    assert plain[1]["loss"] == validated[1]["loss"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": 2.5}, r"steps=2\.5"),
        ({"seconds": -1}, "seconds=-1"),
        ({"seconds": float("nan")}, "seconds=nan"),
        ({"epochs": 0}, "epochs=0"),
        ({"validate_every": 0, "validation": (X, Y)}, "validate_every=0"),
        ({"validate_every": 2}, r"validate_every needs validation\. Received: validate_every=2"),
        ({"validation": {}}, r"need names.*Received: \{\}"),
        ({"validation": {3: (X, Y)}}, r"need names.*Received: \[3\]"),
    ],
)
def test_a_limit_outside_its_range_is_shown(make, net, options, message):
    with pytest.raises(ValueError, match=message):
        fit(make, net, **options)


class Falling(Callback):
    """Makes the loss of one validation set a number of our own, by its turn."""

    def __init__(self, *values):
        self._values = iter(values)

    def on_validation_end(self, trainer, logs):
        if "val_noisy_loss" in logs:
            logs["val_noisy_loss"] = next(self._values)


def test_early_stopping_and_the_best_checkpoint_look_at_each_validation(make, net, tmp_path):
    values = [3.0, 2.0, 1.0, 2.0, 5.0, 5.0]  # after steps 2, 4, 6 (the epoch's last), 8
    options = {"validation": SETS, "validate_every": 2, "epochs": 5}

    def hooks():
        stopping = EarlyStopping("val_noisy_loss", patience=1, restore_best=True)
        return [stopping, Checkpoint(tmp_path, keep_last=1, best="val_noisy_loss")]

    weights = {}

    class Keep(Callback):
        def on_step_end(self, trainer, step):
            weights[trainer.global_step] = trainer.model[0].weight.detach().clone()

    straight = fit(make, net, Keep(), Falling(*values), *hooks(), **options)
    assert max(weights) == 10
    assert torch.equal(straight[0][0], weights[6])
    assert len(straight[1]["loss"]) == 2
    names = [path.name for path in Store(tmp_path).newest_first()]
    assert names == ["epoch-000001-step-00000004", "epoch-000000-step-00000006"]
    watch = Watch()
    assert_same(fit(make, net, watch, Falling(), *hooks(), **options), straight)
    assert not watch.steps


@pytest.mark.parametrize("step", [3, 5, 7, 9])
def test_early_stopping_within_an_epoch_survives_a_kill(make, net, tmp_path, step):
    options = {"validation": SETS, "validate_every": 2, "epochs": 5}
    values = [3.0, 2.0, 2.5, 2.5, 2.5]

    def hooks():
        return EarlyStopping("val_noisy_loss", patience=2, restore_best=True)

    straight = fit(make, net, Falling(*values), hooks(), **options)
    keep = Checkpoint(tmp_path, every_steps=1)
    with pytest.raises(StoppedError):
        fit(make, net, Falling(*values), hooks(), keep, StopAt("step", step), **options)
    rest = values[(step - 1) // 2 :]
    assert_same(fit(make, net, Falling(*rest), hooks(), Checkpoint(tmp_path), **options), straight)


def test_validations_within_epochs_are_shown_and_recorded(make, net, tmp_path, capsys):
    options = {"validation": SETS, "validate_every": 4, "epochs": 2}
    history = fit(make, net, CSVLogger(tmp_path / "log.csv"), run_dir=tmp_path, progress=True, **options)[1]
    shown = [line for line in capsys.readouterr().out.splitlines() if "/6" in line]
    value = history.validations[0]["val_clean_loss"]
    assert shown[0] == f"epoch 1/2  step 4/6  val_clean_loss {value:.4f}"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    validations = [line for line in lines if line["kind"] == "validation"]
    places = [(line["epoch"], line["step"], line["global_step"]) for line in validations]
    assert places == [(0, 4, 4)] * 2 + [(1, 2, 8)] * 2 + [(1, 6, 12)] * 2
    assert validations[0]["metrics"] == {"val_clean_loss": value}
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [row["val_clean_loss"] for row in rows if row["kind"] == "validation"] == [
        str(line["metrics"].get("val_clean_loss", "")) for line in validations
    ]
    found = read_run(tmp_path)
    assert (found.starts, found.notes) == (1, [])
    assert found.validations.step.tolist() == [4, 6, 8, 12]
    assert np.isfinite(found.validations.metrics["val_noisy_loss"]).all()


def test_a_best_that_no_validation_has_is_shown_at_the_first_one(make, net, tmp_path):
    with pytest.raises(ValueError, match=r"best must be one of \['val_clean_loss', 'val_noisy_loss'\].*'val_loss'"):
        fit(make, net, Checkpoint(tmp_path, best="val_loss"), validation=SETS, validate_every=2)


def test_a_stop_that_is_requested_during_validation_comes_when_it_is_done(make, net, tmp_path):
    class Ask(Callback):
        def on_validation_begin(self, trainer):
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    options = {"validation": SETS, "validate_every": 2, "steps": 9}
    straight = fit(make, net, **options)
    with pytest.raises(SystemExit) as ending:
        fit(make, net, Checkpoint(tmp_path), Ask(), **options)
    assert ending.value.code == preemption.EXIT_CODE
    assert Store(tmp_path).newest_first()[0].name == "epoch-000000-step-00000004"
    assert_same(fit(make, net, Checkpoint(tmp_path), **options), straight)
