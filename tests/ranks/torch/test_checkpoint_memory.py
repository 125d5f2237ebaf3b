"""Checkpoints are written and read array by array: what ranks hold meanwhile, and what they do if a disk fails."""

from __future__ import annotations

import pytest
import torch
from peak_memory import Measured, arrays_of

import hvdtrain
from hvdtrain.callbacks import EMA, Checkpoint

pytestmark = [pytest.mark.world_size(2, 3), pytest.mark.usefixtures("hvd")]

WIDTH, LAYERS = 2900, 4
ARRAY = WIDTH * WIDTH * 4  # bytes


def parts(width=WIDTH, seed=0):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    return net, {"optimizer": torch.optim.Adam(net.parameters(), lr=1e-4), "loss": torch.nn.MSELoss()}


def make(width=WIDTH, **options):
    net, others = parts(width)
    return hvdtrain.Trainer(net, **others, **options)


def fit(trainer, *callbacks, epochs=1):
    x = torch.ones(12, trainer.model[0].in_features)
    trainer.fit((x, x), batch_size=12 // trainer.world.size, epochs=epochs, callbacks=callbacks, progress=False)


def held_meanwhile(world, peak):
    return arrays_of(world, peak, ARRAY)


def test_loading_weights_takes_the_memory_of_one_array(world, shared_tmp_path):
    trainer = make()
    fit(trainer)
    trainer.save(shared_tmp_path / "one")
    for _ in range(2):
        net, others = parts()
        with Measured() as loading:
            hvdtrain.Trainer.load(shared_tmp_path / "one", net, weights_only=True, **others)
        held = held_meanwhile(world, loading.peak)
        del net, others
    assert max(held) <= 1.0, held


def test_loading_averages_takes_the_memory_of_one_array_beyond_them(world, shared_tmp_path):
    net, others = parts()
    others["optimizer"] = torch.optim.SGD(net.parameters(), lr=1e-4)
    fit(hvdtrain.Trainer(net, **others), EMA(), Checkpoint(shared_tmp_path, background=False))
    for _ in range(2):
        with Measured() as loading:
            loaded = hvdtrain.Trainer.load(shared_tmp_path / "epoch-000001", net, **others)
        held = held_meanwhile(world, loading.peak - LAYERS * ARRAY)
        del loaded
    assert max(held) <= 1.0, held
