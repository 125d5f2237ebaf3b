"""A user's own scheduler in the Trainer: stepped, and resumed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import EMA, Callback, Schedule
from hvdtrain.distributed import world

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3


@pytest.fixture(autouse=True)
def solo():
    world.use(world.SoloWorld())
    yield
    world.use(None)


def make(rate=0.1):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    return hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss()), optimizer


@pytest.mark.parametrize(("every", "expected"), [("epoch", 0.1 * 0.5**2), ("step", 0.1 * 0.5**6)])
def test_it_steps_as_often_as_requested(every, expected):
    trainer, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trainer.fit((X, Y), epochs=2, batch_size=4, callbacks=[Schedule(scheduler, every=every)], progress=False)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


class Overflow(Callback):
    """Makes the gradient of some steps infinite, and notes weights, rates and which steps were taken."""

    def __init__(self, model, steps):
        self.taken, self.rates, self.weights = [], [], [model.weight.detach().clone()]
        model.weight.register_hook(lambda g: g * float("inf") if self.trainer.global_step in steps else g)

    def on_fit_begin(self, trainer):
        self.trainer = trainer

    def on_step_end(self, trainer, step):
        self.taken.append(trainer.step_taken)
        self.rates.append(trainer.learning_rate)
        self.weights.append(trainer.model.weight.detach().clone())


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first step of Delayed changes nothing
@pytest.mark.parametrize("fused", [False, True])  # a fused optimizer is always called, and skips by itself
@pytest.mark.parametrize("options", [{"precision": "fp16"}, {"nan_policy": "skip"}, {"sync": hvdtrain.Delayed()}])
def test_steps_that_are_left_out_move_no_schedule_and_no_average(hvd, options, fused):
    late = "sync" in options
    if late:
        options = {"precision": "fp16", **options}
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), **options)
    overflow, ema = Overflow(model, {0, 1, 4}), EMA(0.5, every=1)
    schedule = Schedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), every="step")
    trainer.fit((X, Y), epochs=2, batch_size=4, callbacks=[overflow, schedule, ema], progress=False, run_dir=None)
    left_out = {1, 2, 5} if late else {0, 1, 4}
    assert overflow.taken == [step not in left_out for step in range(6)]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** sum(overflow.taken))
    average, *after = overflow.weights
    for taken, weight in zip(overflow.taken, after, strict=True):
        average = (average + weight) / 2 if taken else average
    np.testing.assert_allclose(ema.state()["average.weight"], average, atol=1e-6)


class Ramp:
    """A function of the user's with numbers of its own, which LambdaLR saves."""

    def __init__(self):
        self.seen = {}

    def __call__(self, epoch):
        self.seen[epoch] = len(self.seen)
        return 1.0 / (1 + len(self.seen))


class Holder(Ramp):
    """One that holds what no checkpoint can."""

    def __init__(self):
        super().__init__()
        self.what = object()


lr = torch.optim.lr_scheduler
SCHEDULERS = {
    "chained": lambda o: lr.ChainedScheduler([lr.MultiStepLR(o, [2, 4]), lr.ExponentialLR(o, 0.9)]),
    "constant": lambda o: lr.ConstantLR(o, total_iters=4),
    "cosine": lambda o: lr.CosineAnnealingLR(o, 6),
    "cyclic": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=2, mode="exp_range", gamma=0.9),
    "exponential": lambda o: lr.ExponentialLR(o, 0.5),
    "lambda": lambda o: lr.LambdaLR(o, Ramp()),
    "linear": lambda o: lr.LinearLR(o, total_iters=4),
    "multiplicative": lambda o: lr.MultiplicativeLR(o, lambda epoch: 1 - 0.1 * epoch),
    "multi step": lambda o: lr.MultiStepLR(o, [2, 4, 4]),
    "one cycle": lambda o: lr.OneCycleLR(o, 0.2, total_steps=8),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "polynomial": lambda o: lr.PolynomialLR(o, 6),
    "sequential": lambda o: lr.SequentialLR(o, [lr.LinearLR(o), lr.MultiStepLR(o, [2, 3])], [1]),
    "step": lambda o: lr.StepLR(o, 2),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=4),
    "warm restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 2, 2),
}


@pytest.mark.parametrize(
    ("name", "as_tensor"), [*[(name, False) for name in SCHEDULERS], ("cyclic", True), ("sequential", True)]
)
def test_a_resumed_run_has_the_rates_of_one_that_was_not_stopped(tmp_path, name, as_tensor):
    seen = []

    class Seen(hvdtrain.callbacks.Callback):
        def on_step_begin(self, trainer, step):
            (group,) = trainer._adapter._update.optimizer.param_groups
            seen.append((float(group["lr"]), group.get("momentum")))

    def run(epochs, directory):
        trainer, optimizer = make(torch.tensor(0.1) if as_tensor else 0.1)
        monitor = "loss" if name == "plateau" else None
        schedule = Schedule(SCHEDULERS[name](optimizer), monitor=monitor)
        given = {"callbacks": [Seen(), schedule], "checkpoint_dir": directory, "run_dir": None, "progress": False}
        trainer.fit((X, Y), epochs=epochs, batch_size=12, **given)
        return trainer.decisions

    run(6, None)
    straight, seen[:] = list(seen), []
    run(3, str(tmp_path))
    replaced = [line for line in run(6, str(tmp_path)) if "another one than the checkpoint's" in line]
    assert not replaced
    assert seen == straight
    assert len(set(seen)) > 1


def test_milestones_of_an_older_checkpoint_are_read():
    _, optimizer = make()
    schedule = Schedule(scheduler := lr.MultiStepLR(optimizer, [2, 4, 4]))
    schedule.load_state(json.loads(json.dumps(schedule.state()["scheduler"])))
    assert scheduler.milestones == {2: 1, 4: 2}


def test_a_schedulers_state_that_a_checkpoint_cannot_hold_is_named(tmp_path):
    trainer, optimizer = make()
    schedule = Schedule(lr.LambdaLR(optimizer, Holder()))
    with pytest.raises(
        hvdtrain.errors.CheckpointError, match=r"Schedule\.state\(\)\['scheduler'\]\['lr_lambdas'\]\[0\]\['what'\]"
    ):
        trainer.fit((X, Y), callbacks=[schedule], checkpoint_dir=str(tmp_path), run_dir=None, progress=False)


def test_a_metric_that_history_does_not_have_is_shown():
    trainer, optimizer = make()
    schedule = Schedule(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), monitor="val_los")
    with pytest.raises(ValueError, match="'val_los'"):
        trainer.fit((X, Y), epochs=1, callbacks=[schedule], progress=False)
    json.dumps(schedule.state())


@pytest.mark.parametrize(
    "wrong",
    [
        {"scheduler": 0.1},
        {"scheduler": torch.optim.lr_scheduler.StepLR},
        {"every": "batch"},
        {"every": "step", "monitor": "loss"},
    ],
)
def test_what_is_no_schedule_is_shown(wrong):
    _, optimizer = make()
    given = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), **wrong}
    with pytest.raises((TypeError, ValueError), match="Received: "):
        Schedule(given.pop("scheduler"), **given)
