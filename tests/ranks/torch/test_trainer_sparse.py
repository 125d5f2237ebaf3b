"""Sparse gradients in the Trainer: N ranks train the weights of one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.distributed import world

pytestmark = pytest.mark.usefixtures("hvd")

ROWS = np.random.default_rng(0).integers(0, 11, (17, 5))
ROWS[0] = 3  # five entries at one place
LABELS = np.arange(17) % 3
OPTIMIZERS = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.5),
    "sparse adam": lambda net: torch.optim.SparseAdam(net[0].parameters(), lr=0.1, eps=1e-3),
}


def model(*, sparse):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(11, 4, sparse=sparse), torch.nn.Flatten(), torch.nn.Linear(20, 8), torch.nn.Tanh(),
        torch.nn.Linear(8, 3),
    )  # fmt: skip


def trained(kind, net, *, rows=ROWS, **options):
    options = {"optimizer": OPTIMIZERS[kind](net), "loss": torch.nn.CrossEntropyLoss(), **options}
    trainer = hvdtrain.Trainer(net, **options)
    fit = {"epochs": 2, "progress": False, "run_dir": None}
    trainer.fit((rows, LABELS), batch_size=6 // trainer.world.size, **fit)
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def alone(*args, **options):
    ranks = hvdtrain.init()
    world.use(world.SoloWorld())
    try:
        return trained(*args, **options)
    finally:
        world.use(ranks)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_sparse_gradients_are_clipped_by_the_norm_of_one_process(kind, assert_same_on_all_ranks):
    ours = trained(kind, model(sparse=True), clip_norm=0.05)
    assert_same_on_all_ranks(ours)
    torch.testing.assert_close(ours, alone(kind, model(sparse=True), clip_norm=0.05), atol=1e-6, rtol=0)
    assert (ours - trained(kind, model(sparse=True), clip_norm=1e9)).abs().max() > 1e-3  # it does clip
    if kind != "sparse adam":
        torch.testing.assert_close(ours, alone(kind, model(sparse=False), clip_norm=0.05), atol=1e-6, rtol=0)


@pytest.mark.world_size(2, 3)
def test_accumulated_sparse_gradients_of_unequal_shards_are_those_of_one_process():
    ours = trained("sgd", model(sparse=True), clip_norm=0.05, accumulate=2)
    torch.testing.assert_close(ours, alone("sgd", model(sparse=True), clip_norm=0.05, accumulate=2), atol=1e-6, rtol=0)


@pytest.mark.world_size(2)
def test_a_step_whose_sparse_gradient_is_not_finite_is_not_taken():
    net = model(sparse=True)
    with torch.no_grad():
        net[0].weight[10] = float("nan")  # the samples that have this row
    others = [p.detach().clone() for p in net.parameters()]
    trained("sgd", net, nan_policy="skip", clip_norm=1.0, rows=np.full_like(ROWS, 10))
    for parameter, before in zip(net.parameters(), others, strict=True):
        torch.testing.assert_close(parameter.detach(), before, equal_nan=True, atol=0, rtol=0)
