"""Gradients that a rank, or all ranks, do not have; sparse ones; other types and layouts."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.world_size(2, 3), pytest.mark.on_gpus]


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(2, 1, bias=False)
        self.b = torch.nn.Linear(2, 1, bias=False)
        self.never = torch.nn.Linear(2, 1, bias=False)
        self.frozen = torch.nn.Linear(2, 1, bias=False).requires_grad_(False)


def wrap(hvd, model, **options):
    plain = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1)
    return hvd.DistributedOptimizer(plain, model.named_parameters(), **options)


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"compression": "bf16"}])
def test_missing_on_one_rank_counts_as_zeros_and_missing_on_all_stays_missing(
    hvd, rank, size, assert_same_on_all_ranks, options
):
    model = Branches()
    if "compression" in options:
        options = {"compression": getattr(hvd.Compression, options["compression"])}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = wrap(hvd, model, **options)
    for _ in range(2):
        optimizer.zero_grad()
        branch = model.a if rank == 0 else model.b
        branch(torch.ones(1, 2)).sum().backward()
        optimizer.synchronize()
        torch.testing.assert_close(model.a.weight.grad, torch.full((1, 2), 1 / size), rtol=5e-3, atol=0)
        torch.testing.assert_close(model.b.weight.grad, torch.full((1, 2), (size - 1) / size), rtol=5e-3, atol=0)
        assert model.never.weight.grad is None
        with optimizer.skip_synchronize():
            optimizer.step()
    # no weight decay, no momentum: just as in one process
    assert torch.equal(model.never.weight, before["never.weight"])
    assert torch.equal(model.frozen.weight, before["frozen.weight"])
    assert model.never.weight not in optimizer.state
    assert_same_on_all_ranks(*model.parameters())


def test_a_rank_may_skip_backward(hvd, task, rank, size, difference):
    model, alone = task.model(), task.model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step, batch in enumerate(task.batches(4)):
        optimizer.zero_grad()
        if step != 2 or rank == 0:
            task.loss(model, task.mine(batch)).backward()
        optimizer.step()
        reference.zero_grad()
        if step == 2:
            (task.loss(alone, (batch[0][::size], batch[1][::size])) / size).backward()
        else:
            task.loss(alone, batch).backward()
        reference.step()
    assert difference(model, alone) < 1e-6


def test_parameters_unfrozen_later_are_reduced(hvd, rank, size):
    model = Branches()
    optimizer = wrap(hvd, model)
    model.a(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.frozen.requires_grad_(True)
    for _ in range(2):
        optimizer.zero_grad()
        (model.frozen(torch.ones(1, 2)).sum() * rank).backward()
        optimizer.synchronize()
        torch.testing.assert_close(model.frozen.weight.grad, torch.full((1, 2), (size - 1) / 2))
        with optimizer.skip_synchronize():
            optimizer.step()


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("absent_on_rank_0", [False, True])
def test_sparse_gradients(hvd, rank, size, as_dense, absent_on_rank_0):
    torch.manual_seed(0)
    table = torch.nn.Embedding(7, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), sparse_as_dense=as_dense
    )
    before = table.weight.detach().clone()
    expected = torch.zeros(7, 2)
    for r in range(int(absent_on_rank_0), size):
        expected[r] += 1 / size
        expected[5] += 2 / size
    for step in range(2):
        optimizer.zero_grad()
        if not (absent_on_rank_0 and rank == 0):
            table(torch.tensor([rank, 5, 5])).sum().backward()
        optimizer.step()
        torch.testing.assert_close(before - table.weight, expected * (step + 1))


def test_sparse_here_and_dense_there_is_an_error_on_every_rank(hvd, rank):
    from hvdtrain.errors import HvdTrainError

    param = torch.nn.Parameter(torch.zeros(3, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("mixture", param)])
    param.grad = torch.ones(3, 2).to_sparse(1) if rank == 0 else None
    if rank != 0:
        # dense, but not started: a dense allreduce already on its way would have nobody to meet
        param.grad = torch.ones(3, 2)
    with pytest.raises(HvdTrainError, match="mixture is sparse on 1"):
        optimizer.synchronize()


def test_bfloat16_parameters_train(hvd, task, assert_same_on_all_ranks):
    model = task.model().to(torch.bfloat16)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    alone = task.model().to(torch.bfloat16)
    batch = tuple(t.to(torch.bfloat16) for t in task.batches(1)[0])
    task.loss(model, task.mine(batch)).backward()
    optimizer.step()
    task.loss(alone, batch).backward()
    torch.testing.assert_close(model[0].weight.grad, alone[0].weight.grad, rtol=0.05, atol=2e-3)
    assert model[0].weight.grad.dtype == torch.bfloat16
    assert_same_on_all_ranks(*model.parameters())


def test_channels_last_gradients_are_reduced(hvd, rank, size):
    param = torch.nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("conv", param)])
    data = torch.arange(96.0).view(2, 3, 4, 4)
    (param * data * (rank + 1)).sum().backward()
    assert param.grad.is_contiguous(memory_format=torch.channels_last)
    optimizer.step()
    torch.testing.assert_close(-param.detach(), data * (size + 1) / 2)


def test_graphs_kept_for_a_second_derivative_do_not_disturb(hvd, rank, size):
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.0), [("p", param)])
    (param.pow(3).sum() * rank).backward(create_graph=False)
    optimizer.step()
    torch.testing.assert_close(param.grad, torch.full((2,), 3.0 * (size - 1) / 2))
