"""A scheduler that is made for a number of steps, where fit takes another number, or more ranks resume it."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import Callback, Schedule

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3
EPOCHS = 4
lr = torch.optim.lr_scheduler


def cosine(total, step):
    return 0.5 + 0.5 * math.cos(math.pi * step / total)


def warm_up_and_cosine(optimizer, total):
    warm_up = lr.LinearLR(optimizer, 0.1, total_iters=total // 4)
    return lr.SequentialLR(
        optimizer, [warm_up, lr.CosineAnnealingLR(optimizer, total - total // 4)], milestones=[total // 4]
    )


MAKE = {
    "cosine": lr.CosineAnnealingLR,
    "one cycle": lambda optimizer, total: lr.OneCycleLR(optimizer, 0.2, total_steps=total),
    "polynomial": lr.PolynomialLR,
    "closure": lambda optimizer, total: lr.LambdaLR(optimizer, lambda step: cosine(total, step)),
    "default": lambda optimizer, total: lr.LambdaLR(optimizer, lambda step, total=total: cosine(total, step)),
    "partial": lambda optimizer, total: lr.LambdaLR(optimizer, functools.partial(cosine, total)),
    "sequential": warm_up_and_cosine,
    "chained": lambda optimizer, total: lr.ChainedScheduler([lr.CosineAnnealingLR(optimizer, total)]),
}


class Rates(Callback):
    def __init__(self, optimizer):
        self.optimizer, self.seen = optimizer, []

    def on_step_begin(self, trainer, step):
        (group,) = self.optimizer.param_groups
        self.seen.append((group["lr"], group["momentum"]))


class StopAfter(Callback):
    def __init__(self, epochs):
        self.epochs = epochs

    def on_epoch_end(self, trainer, epoch, logs):
        if epoch + 1 == self.epochs:
            trainer.stop()


@pytest.fixture
def run(make, net):
    """Return a function that trains as a script does, and returns each step's rate and momentum, and the Trainer."""

    def train(scheduler_of, *, every="step", stop_after=0, epochs=EPOCHS, rate=0.1, accumulate=1, **options):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        trainer, rates = make(model, optimizer=optimizer, accumulate=accumulate), Rates(optimizer)
        hooks = [rates, StopAfter(stop_after), Schedule(scheduler_of(optimizer), every=every)]
        trainer.fit((X, Y), epochs=epochs, callbacks=hooks, run_dir=None, progress=False, **options)
        return rates.seen, trainer

    return train


def for_fit(name):
    return lambda optimizer: functools.partial(MAKE[name], optimizer)


def for_steps(name, total):
    return lambda optimizer: MAKE[name](optimizer, total)


@pytest.mark.parametrize("by_function", [True, False])
@pytest.mark.parametrize("name", MAKE)
def test_a_resume_with_other_steps_an_epoch_has_the_rates_of_such_a_run(run, tmp_path, name, by_function):
    def until(epochs, batch_size, folder=None):  # another batch size has the steps of another number of ranks
        scheduler_of = for_fit(name) if by_function else for_steps(name, EPOCHS * 12 // batch_size)
        return run(scheduler_of, stop_after=epochs, batch_size=batch_size, checkpoint_dir=folder)[0]

    straight = until(EPOCHS, 3)
    assert len(until(1, 2, tmp_path)) == 6
    assert until(EPOCHS, 3, tmp_path) == straight[4:]
    assert len({rate for rate, _ in straight}) > EPOCHS


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("name", MAKE)
def test_a_longer_run_has_the_rates_of_the_longer_schedule(run, tmp_path, name, every):
    given = {"every": every, "batch_size": 3}
    straight, _ = run(for_fit(name), **given, epochs=8)
    run(for_fit(name), **given, epochs=4, checkpoint_dir=tmp_path)
    seen, trainer = run(for_fit(name), **given, epochs=8, checkpoint_dir=tmp_path)
    assert seen == straight[16:]
    assert sum(line.startswith("Schedule: the scheduler is another one") for line in trainer.decisions) == 1


@pytest.mark.parametrize("name", MAKE)
def test_the_same_schedule_resumes_bit_for_bit_without_a_word(run, tmp_path, name):
    straight, _ = run(for_fit(name), batch_size=3)
    run(for_fit(name), batch_size=3, stop_after=2, checkpoint_dir=tmp_path)
    seen, trainer = run(for_fit(name), batch_size=3, checkpoint_dir=tmp_path)
    assert seen == straight[8:]
    assert not [line for line in trainer.decisions if line.startswith("Schedule")]


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({"batch_size": 5}, 12),
        ({"batch_size": 5, "accumulate": 2}, 8),
        ({"batch_size": 5, "steps": 7}, 7),
        ({"batch_size": 5, "steps": 7, "epochs": None}, 7),
        ({"batch_size": 5, "every": "epoch"}, 4),
        ({"batch_size": 5, "every": "epoch", "steps": 7}, 3),
    ],
)
def test_a_function_gets_the_number_of_its_schedulers_steps(run, options, times):
    asked = []

    def scheduler_of(optimizer):
        return lambda steps: asked.append(steps) or lr.ConstantLR(optimizer, 0.5, total_iters=steps)

    seen, trainer = run(scheduler_of, **options)
    assert asked == [times]
    assert trainer.total_steps == len(seen) == trainer.global_step
    assert trainer.count_steps((X, Y), batch_size=5, epochs=4) == (8 if "accumulate" in options else 12)


def test_a_schedule_of_fixed_length_stays_where_it_was(run, tmp_path):
    fixed = lambda optimizer: lr.StepLR(optimizer, 5, 0.5)  # noqa: E731
    run(fixed, batch_size=2, stop_after=1, checkpoint_dir=tmp_path)
    seen, _ = run(fixed, batch_size=3, checkpoint_dir=tmp_path)
    assert [rate for rate, _ in seen] == [0.1 * 0.5 ** ((6 + step) // 5) for step in range(12)]


@pytest.mark.parametrize("name", ["cosine", "one cycle", "polynomial", "sequential"])
def test_a_schedule_for_another_number_of_steps_is_said_once(run, caplog, name):
    _, trainer = run(for_steps(name, 27), batch_size=3)
    assert caplog.text.count("is made for 27 steps, and fit takes 16 on 1 rank. Schedule(lambda steps: ") == 1
    assert sum("made for 27 steps" in line for line in trainer.decisions) == 1
    run(for_steps(name, 16), batch_size=3)
    assert caplog.text.count("is made for") == 1


def test_a_second_fit_begins_its_schedule_again(make, net):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = Schedule(lambda steps: lr.CosineAnnealingLR(optimizer, steps), every="step")
    trainer, seen = make(model, optimizer=optimizer), []
    for epochs in (1, 2):
        trainer.fit((X, Y), epochs=epochs, batch_size=3, callbacks=[schedule], run_dir=None, progress=False)
        seen.append(trainer.history["learning_rate"])
    assert seen == [[0.0], [pytest.approx(0.1 * cosine(8, 4)), 0.0]]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([*zip(X, Y, strict=True)])


def test_a_number_of_steps_that_is_not_known_is_refused(run, make):
    stream = hvdtrain.Sharded(torch.utils.data.DataLoader(Stream(), batch_size=3))
    with pytest.raises(ValueError, match=r"count_steps needs data whose length is known.*fit\(steps=...\)"):
        make().count_steps(stream)
    with pytest.raises(ValueError, match=r"Schedule\(function\) needs to know how many steps.*seconds alone"):
        run(for_fit("cosine"), epochs=None, seconds=0.1)
    with pytest.raises(TypeError, match=r"function \(steps\) -> scheduler. Received: None"):
        run(lambda optimizer: lambda steps: None)
