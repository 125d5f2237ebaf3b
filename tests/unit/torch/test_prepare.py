"""`hvdtrain.prepare` in one process: the same script as on many ranks."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdtrain
from hvdtrain.distributed import world


def test_a_loop_that_clips_between_synchronize_and_step_runs_alone_as_on_many_ranks(hvd, monkeypatch):
    monkeypatch.setattr(world, "_world", None)
    x = torch.linspace(-1, 1, 20).reshape(10, 2)
    model = torch.nn.Linear(2, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=10)
    model, optimizer, loader = hvdtrain.prepare(model, plain, loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
    moved = sum(float((value - before[name]).norm() ** 2) for name, value in model.state_dict().items()) ** 0.5
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_an_optimizer_that_needs_a_closure_is_refused_with_the_way_that_works(hvd, monkeypatch):
    monkeypatch.setattr(world, "_world", None)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"Use hvdtrain\.Trainer.*Received: LBFGS"):
        hvdtrain.prepare(model, torch.optim.LBFGS(model.parameters()), DataLoader(TensorDataset(torch.ones(4, 2))))
