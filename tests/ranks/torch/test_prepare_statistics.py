"""What `prepare` makes of BatchNorm's statistics in a loop of the user's own."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdtrain

pytestmark = pytest.mark.world_size(2, 3)
X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))


def prepared(norm):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), norm, torch.nn.Linear(5, 1))
    data = DataLoader(TensorDataset(X), batch_size=4)
    return hvdtrain.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)


def train(model, optimizer, loader):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        yield model[1].running_mean.clone()


def test_running_statistics_are_the_mean_of_all_ranks_after_a_pass(hvd, size, assert_same_on_all_ranks):
    model, optimizer, loader = prepared(torch.nn.BatchNorm1d(5))
    *_, last = train(model, optimizer, loader)
    parts = hvd.allgather(last[None])
    assert not torch.equal(parts[0], parts[1])
    torch.testing.assert_close(model[1].running_mean, parts.double().mean(0).float(), atol=1e-7, rtol=0)
    assert_same_on_all_ranks(*model.buffers(), *model.parameters())


def test_a_pass_in_eval_mode_exchanges_nothing(hvd, rank):
    model, _, loader = prepared(torch.nn.BatchNorm1d(5))
    model.eval()
    if rank == 0:  # others would wait for it
        assert sum(len(x) for (x,) in loader)
    hvd.barrier()


def test_torchs_sync_batch_norm_synchronizes(hvd, assert_same_on_all_ranks):
    model, optimizer, loader = prepared(torch.nn.SyncBatchNorm(5))
    assert type(model[1]) is hvd.SyncBatchNorm
    for _ in train(model, optimizer, loader):
        assert_same_on_all_ranks(*model.buffers())


@pytest.mark.parametrize("last", [2, 5], ids=["a rank without samples or with one", "short parts"])
def test_sync_batch_norm_trains_like_one_process_on_short_batches(hvd, size, last):
    def trained(batch_size, prepare):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
        given = hvd.convert_sync_batchnorm(model) if prepare else model
        x = torch.randn(8 * size + last, 4, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(x), batch_size=batch_size)
        optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
        if prepare:
            given, optimizer, loader = hvdtrain.prepare(given, optimizer, loader)
        for _ in range(2):
            for (batch,) in loader:
                optimizer.zero_grad()
                (given(batch) - 1).abs().mean().backward()
                optimizer.step()
        return list(model.state_dict().values())

    for ours, theirs in zip(trained(4, prepare=True), trained(4 * size, prepare=False), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)  # two samples leave gradients near zero
