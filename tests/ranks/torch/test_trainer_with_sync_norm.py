"""The Trainer over a model whose layers meet the other ranks' in forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hvdtrain


@pytest.mark.world_size(2)
def test_a_bad_gradient_is_found_beside_a_rank_whose_samples_do_not_count(hvd):
    x, y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    x[0] = float("nan")
    y[1::2] = -100  # what rank 1 has
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), hvd.SyncBatchNorm(4), torch.nn.Linear(4, 2))
    trainer = hvdtrain.Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.CrossEntropyLoss(),
        nan_policy="skip",
    )
    start = [p.detach().clone() for p in model.parameters()]
    history = trainer.fit(rows, epochs=2, progress=False)
    assert len(history["seconds"]) == 2
    assert all(torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))
    assert np.isfinite(model[1].running_mean.numpy()).all()


@pytest.mark.world_size(2)
def test_a_step_in_which_no_label_counts_on_any_rank_changes_no_weight(hvd):
    y = torch.arange(8) % 2
    y[4:] = -100  # the second step's
    rows = torch.utils.data.TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), y)
    trained = []
    for steps in (1, 2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), hvd.SyncBatchNorm(4), torch.nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())
        trainer.fit(torch.utils.data.DataLoader(rows, batch_size=2), epochs=1, steps=steps, progress=False)
        trained.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))
