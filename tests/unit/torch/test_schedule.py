"""A user's own scheduler in the Trainer: stepped, and resumed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import Schedule
from hvdtrain.distributed import world

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3


@pytest.fixture(autouse=True)
def solo():
    world.use(world.SoloWorld())
    yield
    world.use(None)


def make():
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss()), optimizer


@pytest.mark.parametrize(("every", "expected"), [("epoch", 0.1 * 0.5**2), ("step", 0.1 * 0.5**6)])
def test_it_steps_as_often_as_requested(every, expected):
    trainer, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trainer.fit((X, Y), epochs=2, batch_size=4, callbacks=[Schedule(scheduler, every=every)], progress=False)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def test_a_resumed_run_continues_the_schedule(tmp_path):
    def run(epochs, directory):
        trainer, optimizer = make()
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        given = {"callbacks": [Schedule(scheduler)], "checkpoint_dir": directory, "progress": False}
        trainer.fit((X, Y), epochs=epochs, batch_size=4, **given)
        return optimizer.param_groups[0]["lr"], scheduler.last_epoch

    straight = run(5, None)
    run(2, str(tmp_path))
    assert run(5, str(tmp_path)) == straight


def test_a_metric_that_history_does_not_have_is_shown():
    trainer, optimizer = make()
    schedule = Schedule(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), monitor="val_los")
    with pytest.raises(ValueError, match="'val_los'"):
        trainer.fit((X, Y), epochs=1, callbacks=[schedule], progress=False)
    json.dumps(schedule.state())


@pytest.mark.parametrize("wrong", [{"scheduler": 0.1}, {"every": "batch"}, {"every": "step", "monitor": "loss"}])
def test_what_is_no_schedule_is_shown(wrong):
    _, optimizer = make()
    given = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), **wrong}
    with pytest.raises((TypeError, ValueError), match="Received: "):
        Schedule(given.pop("scheduler"), **given)
