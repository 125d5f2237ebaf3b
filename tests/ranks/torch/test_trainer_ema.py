"""Averaged weights on several ranks: equal to one process's, equal on all ranks, and resumed bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trainer_kit import StopAt, StoppedError

import hvdtrain
from hvdtrain.callbacks import EMA, Checkpoint
from hvdtrain.distributed import world

pytestmark = pytest.mark.usefixtures("hvd")

X = np.random.default_rng(0).normal(size=(29, 4)).astype(np.float32)
Y = np.arange(29) % 3


def trained(*callbacks):
    """Return the averages, and each epoch's metrics of them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())
    ema = EMA(0.8, every=2)
    options = {"epochs": 3, "batch_size": 6 // trainer.world.size, "progress": False, "run_dir": None}
    history = trainer.fit((X, Y), validation=(X, Y), callbacks=[ema, *callbacks], **options)
    with ema.averaged():
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), history["val_loss"]


@pytest.mark.world_size(2, 3)
def test_averages_are_those_of_one_process(assert_same_on_all_ranks):
    averages, losses = trained()
    assert_same_on_all_ranks(averages)
    ranks = hvdtrain.init()
    world.use(world.SoloWorld())
    try:
        expected, expected_losses = trained()
    finally:
        world.use(ranks)
    torch.testing.assert_close(averages, expected, atol=1e-6, rtol=0)
    assert losses == pytest.approx(expected_losses, abs=1e-6)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stop", [2, 7])
def test_a_resumed_run_has_the_averages_of_one_that_was_not_stopped(shared_tmp_path, stop):
    straight, losses = trained()
    with pytest.raises(StoppedError):
        trained(Checkpoint(shared_tmp_path, every_steps=1), StopAt(stop + 1))
    resumed, resumed_losses = trained(Checkpoint(shared_tmp_path, every_steps=1))
    assert torch.equal(resumed, straight)
    assert resumed_losses == losses
