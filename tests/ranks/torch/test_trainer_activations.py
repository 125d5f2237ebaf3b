"""Activations that backward computes again change no bit of a job's training, whatever ranks exchange meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trainer_kit import data, fit

import hvdtrain
from hvdtrain.errors import DesyncError


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.up, self.down, self.drop = norm(16), nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))


def make(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *(Block(norm) for _ in range(3)), nn.Linear(16, 3))


def own_step(net, batch):
    x, y = batch
    counted = y != 0  # on some ranks none
    losses = cross_entropy(net(x), y, reduction="none") * counted
    return hvdtrain.Loss(losses.sum() / max(int(counted.sum()), 1), count=counted.sum())


def assert_same_training(norm, samples=25, **options):
    nets = make(norm), make(norm)
    for net, rule in zip(nets, (False, "blocks"), strict=True):
        torch.manual_seed(3)  # `rank_streams` makes other numbers of it on each rank
        fit(net, train=data(samples), checkpoint_activations=rule, **options)  # the last batch is not every rank's
    for (name, plain), again in zip(nets[0].state_dict().items(), nets[1].state_dict().values(), strict=True):
        assert torch.equal(plain, again), name


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "options",
    [
        {"nan_policy": "skip", "clip_norm": 0.5},
        {"accumulate": 2, "precision": "bf16", "compression": "bf16"},
        {"sync": hvdtrain.Delayed()},
        {"sync": hvdtrain.LocalSGD(every=3)},
        {"accumulate": 3, "cutoff": 1.0},
        {"step": own_step, "loss": None, "micro_batch": 2},
    ],
    ids=" ".join,
)
def test_weights_are_the_same_bit_for_bit(hvd, options):
    assert_same_training(nn.LayerNorm, **options)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("options", [{}, {"step": own_step, "loss": None, "nan_policy": "skip"}], ids=["loss", "step"])
def test_layers_that_synchronize_do_so_again_on_all_ranks(hvd, options):
    """In the last step of an epoch, the third rank has no samples; in others, a rank may have none that counts."""
    assert_same_training(hvd.SyncBatchNorm, 26, **options)


@pytest.mark.world_size(2)
def test_a_rule_that_depends_on_the_rank_is_an_error_on_all_ranks(hvd):
    net = make(nn.LayerNorm)
    with pytest.raises(
        DesyncError, match=r"1 Block \(1\).* on rank 0 but .*1 Block \(2\).*must not depend on the rank"
    ):
        fit(net, checkpoint_activations=lambda module: module is net[1 + hvd.rank()])
