"""Ranks other than the root may make their model without values."""

from __future__ import annotations

import pytest
import torch
import trainer_kit as kit

import hvdtrain
from hvdtrain.callbacks import SyncCheck

pytestmark = [pytest.mark.world_size(2, 3), pytest.mark.two_suffice]


class Net(torch.nn.Module):
    """Tied weights, a buffer that is in no checkpoint, a frozen weight, and values that no module can make again."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.full((6,), 0.5), persistent=False)
        self.frozen = torch.nn.Parameter(torch.ones(6), requires_grad=False)
        self.head = torch.nn.Linear(6, 3)
        torch.nn.init.constant_(self.head.bias, 0.25)

    def forward(self, x):
        return self.head(self.last(self.norm(self.first(x.flatten(1)))) * self.scale * self.frozen)


def net(device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        return Net()


def elsewhere(rank):
    return "cpu" if rank == 0 else "meta"


@pytest.mark.parametrize(
    "options", [{}, {"shard": "optimizer"}, {"shard": "gradients"}, {"sync": hvdtrain.LocalSGD(2)}]
)
def test_training_is_that_of_a_model_with_values_everywhere(world, rank, options, assert_same_on_all_ranks):
    nets = [net(), net(elsewhere(rank))]
    for each in nets:
        kit.fit(each, "adam", hooks=[SyncCheck(every=1)], **options)
    for ours, right in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        assert torch.equal(ours, right)
    assert nets[1].last.weight is nets[1].first.weight
    assert_same_on_all_ranks(*nets[1].parameters(), *nets[1].buffers())


def test_ranks_evaluate_with_the_roots_values_before_any_fit(world, rank):
    right, ours = (kit.make_trainer(net(device)).evaluate(kit.data()) for device in ("cpu", elsewhere(rank)))
    assert ours == right


def test_an_optimizer_whose_state_is_made_at_once_gets_the_roots(world, rank):
    nets = [net(), net(elsewhere(rank))]
    for each in nets:
        trained = [p for p in each.parameters() if p.requires_grad]
        kit.fit(each, torch.optim.Adagrad(trained, lr=0.1, initial_accumulator_value=0.1))
    for ours, right in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        assert torch.equal(ours, right)


def test_a_prepared_model_has_the_roots_values(world, rank):
    right, ours = net(), net(elsewhere(rank))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 6)), batch_size=2)
    ours, *_ = hvdtrain.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1), loader)
    for one, other in zip([*ours.parameters(), *ours.buffers()], [*right.parameters(), *right.buffers()], strict=True):
        assert torch.equal(one, other)


def test_a_root_without_values_is_an_error_on_every_rank(world, rank):
    with pytest.raises(ValueError, match=r'frozen on the device "meta" on rank 0\. Make it with values on rank 0'):
        kit.make_trainer(net("meta" if rank == 0 else "cpu"))
