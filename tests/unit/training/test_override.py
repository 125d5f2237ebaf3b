"""A run that resumes with other settings of the optimizer: it says whose it uses, and takes the script's on request."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from hvdtrain.callbacks import Callback, Schedule

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3
lr = torch.optim.lr_scheduler


class Rates(Callback):
    """Notes each step's settings, and stops after an epoch."""

    def __init__(self, optimizer, stop_after):
        self.optimizer, self.stop_after, self.seen = optimizer, stop_after, []

    def on_step_begin(self, trainer, step):
        self.seen.append(self.optimizer.param_groups[0]["lr"])

    def on_epoch_end(self, trainer, epoch, logs):
        if epoch + 1 == self.stop_after:
            trainer.stop()


@pytest.fixture
def run(make, net, tmp_path):
    """Return a function that trains as a script does; it returns the optimizer, the rates, and what was said."""

    def train(rate=0.1, decay=0.0, *, stop_after=0, schedule=None, override=(), folder=tmp_path, **options):
        model = net()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 2 * rate}]
        optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=decay)
        rates = Rates(optimizer, stop_after)
        hooks = [rates] if schedule is None else [rates, Schedule(schedule(optimizer), every="step")]
        trainer = make(model, optimizer=optimizer, **options)
        given = {"checkpoint_dir": folder, "override": override, "run_dir": None, "progress": False}
        trainer.fit((X, Y), epochs=4, batch_size=3, callbacks=hooks, **given)
        return optimizer, rates.seen, [line for line in trainer.decisions if "script" in line or "another" in line]

    return train


def test_the_checkpoints_settings_are_used_and_named_beside_the_scripts(run):
    run(stop_after=1)
    optimizer, rates, said = run(0.001, 0.25)
    assert rates == [0.1] * 12
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    unused = [("lr", "0.1, 0.2", "0.001, 0.002"), ("weight_decay", "0, 0", "0.25, 0.25")]
    assert said == [
        f"{name} {old}: the checkpoint's, not the script's {own}; fit(override=[\"{name}\"]) takes the script's"
        for name, old, own in unused
    ]


def test_nothing_is_said_of_equal_settings(run):
    run(stop_after=1)
    assert run()[2] == run(override=["lr"])[2] == []


@pytest.mark.parametrize("override", [["lr"], ["weight_decay", "lr"], ["weight_decay"]])
def test_what_is_overridden_is_the_scripts_and_the_rest_the_checkpoints(run, override):
    run(stop_after=1)
    optimizer, _, said = run(0.001, 0.25, override=override)
    lrs, decay = [group["lr"] for group in optimizer.param_groups], optimizer.param_groups[0]["weight_decay"]
    assert lrs == ([0.001, 0.002] if "lr" in override else [0.1, 0.2])
    assert decay == (0.25 if "weight_decay" in override else 0.0)
    assert [line.partition(" ")[0] for line in said if line.endswith("the script's, by override")] == sorted(override)


def test_a_setting_is_taken_once_and_restarts_keep_what_became_of_it(run):
    run(stop_after=1)
    half = lambda optimizer: lr.StepLR(optimizer, 4, 0.5)  # noqa: E731
    _, first, _ = run(0.01, override=["lr"], schedule=half, stop_after=2)
    _, second, said = run(0.01, override=["lr"], schedule=half)
    assert first == [0.01] * 4
    assert second == pytest.approx([0.005] * 4 + [0.0025] * 4)
    assert said == []


def test_a_run_that_resumes_within_its_warmup_ends_it_at_the_checkpoints_rate(run):
    options = {"lr_scaling": "none", "warmup_epochs": 2}
    straight = run(folder=None, **options)[1]
    run(stop_after=1, **options)
    assert run(0.001, **options)[1] == straight[4:]


@pytest.mark.parametrize("by_function", [True, False])
@pytest.mark.parametrize("override", [True, False])
@pytest.mark.parametrize(
    "make_schedule",
    [lambda o, n: lr.CosineAnnealingLR(o, n), lambda o, n: lr.SequentialLR(o, [lr.LinearLR(o), lr.StepLR(o, 2)], [6])],
)
def test_a_schedule_computes_from_the_rate_that_is_used(run, make_schedule, override, by_function):
    schedule = lambda o: functools.partial(make_schedule, o) if by_function else make_schedule(o, 16)  # noqa: E731
    straight = {rate: run(rate, schedule=schedule, folder=None)[1] for rate in (0.1, 0.01)}
    run(schedule=schedule, stop_after=1)
    _, rates, said = run(0.01, schedule=schedule, override=["lr"] if override else [])
    assert rates == straight[0.01 if override else 0.1][4:]
    assert len(said) == 1 + override
    assert ("the checkpoint's, not from the script's 0.01, 0.02" in said[-1]) is not override


@pytest.mark.parametrize("wrong", [["rate"], "lr", ["lr", "params"]])
def test_a_name_that_is_no_setting_is_refused(run, wrong):
    with pytest.raises(ValueError, match=r"override must be a list of names among \['amsgrad', 'betas'.*Received: "):
        run(override=wrong)
