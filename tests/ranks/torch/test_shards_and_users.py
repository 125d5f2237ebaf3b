"""Shards beside what users do to an optimizer and to its weights: hooks of a step, and another order in memory."""

from __future__ import annotations

import copy

import pytest
import torch
import trainer_kit as kit
from torch.optim.optimizer import register_optimizer_step_post_hook

import hvdtrain
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.reduction.sharded import Shards

pytestmark = pytest.mark.world_size(2, 3)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 147), torch.nn.Tanh(), torch.nn.Linear(147, 3))


def clip_all(optimizer, args, kwargs):
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)


def limit_weights(optimizer, args, kwargs):
    with torch.no_grad():
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.div_(weight.norm().clamp(min=1.0))


def trained(hvd, *, shard, before=None, after=None, relaid=None, steps=4):
    """Return the weights after steps of the drop-in with these hooks; `relaid(net, optimizer)` comes in the middle."""
    net = model()
    plain = torch.optim.Adam(net.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(plain, net.named_parameters(), shard_state=shard)
    if before is not None:
        optimizer.register_step_pre_hook(before)
    if after is not None:
        optimizer.register_step_post_hook(after)
    generator = torch.Generator().manual_seed(hvd.rank())
    for step in range(steps):
        if step == 2 and relaid is not None:
            relaid(net, optimizer)
        optimizer.zero_grad()
        net(torch.randn(5, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("hooks", [{"before": clip_all}, {"after": limit_weights}])
def test_hooks_of_a_step_see_whole_weights_and_gradients(hvd, hooks, assert_same_on_all_ranks):
    ours, right = (trained(hvd, shard=shard, **hooks) for shard in (True, False))
    assert all(map(torch.equal, ours, right))
    assert any(not torch.equal(*pair) for pair in zip(ours, trained(hvd, shard=True), strict=True))
    assert_same_on_all_ranks(*ours)


def test_hooks_of_all_optimizers_see_whole_weights(hvd):
    hook = register_optimizer_step_post_hook(limit_weights)
    try:
        ours, right = (trained(hvd, shard=shard) for shard in (True, False))
    finally:
        hook.remove()
    assert all(map(torch.equal, ours, right))


def test_a_hook_may_change_the_arguments_of_a_step(hvd):
    seen = []
    trained(hvd, shard=True, before=lambda optimizer, args, kwargs: (args, {"closure": None}), steps=1)
    trained(hvd, shard=True, after=lambda optimizer, args, kwargs: seen.append((args, kwargs)), steps=1)
    assert [(len(args), kwargs) for args, kwargs in seen] == [(1, {})]


def fitted(shard, **hooks):
    net = kit.model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    if "before" in hooks:
        optimizer.register_step_pre_hook(hooks["before"])
    if "after" in hooks:
        optimizer.register_step_post_hook(hooks["after"])
    trainer = kit.make_trainer(net, optimizer, shard=shard)
    trainer.fit(kit.data(), batch_size=kit.BATCH, epochs=1, progress=False, run_dir=None)
    return list(net.parameters())


@pytest.mark.parametrize(
    ("shard", "hooks"),
    [
        ("optimizer", {"before": clip_all, "after": limit_weights}),
        ("gradients", {"after": limit_weights}),
    ],
)
def test_in_the_trainer_too_hooks_see_whole_weights_and_gradients(world, shard, hooks):
    for ours, right in zip(fitted(shard, **hooks), fitted(None, **hooks), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-6)


def test_a_hook_before_the_step_is_refused_where_no_rank_has_whole_gradients(world, rank):
    with pytest.raises(
        ValueError, match=f"no rank has whole gradients.*clip_all.*register_step_pre_hook.* rank {rank}"
    ):
        fitted("gradients", before=clip_all)


def test_an_optimizer_with_a_state_keeps_it_when_weights_alone_are_loaded(world, shared_tmp_path, monkeypatch):
    kit.make_trainer(kit.model(), shard="optimizer").save(shared_tmp_path / "one")
    net = kit.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(kit.data()[0]).square().sum().backward()
    optimizer.step()
    before = [optimizer.state[p]["momentum_buffer"].clone() for p in net.parameters()]
    options = {"optimizer": optimizer, "loss": torch.nn.CrossEntropyLoss(), "shard": "optimizer"}
    with monkeypatch.context() as patched:
        patched.setattr(Shards, "whole", None)  # no rank gathers the state: it may have no room for it
        trainer = hvdtrain.Trainer.load(shared_tmp_path / "one", net, weights_only=True, **options)
    held = [array for name, array in trainer.state().arrays.items() if name.startswith("optimizer.")]
    assert len(held) == len(before)
    assert all(torch.equal(torch.from_numpy(ours), right) for ours, right in zip(held, before, strict=True))


def in_columns(net, optimizer):
    net[0].weight.data = net[0].weight.data.t().contiguous().t()


def in_columns_with_whole_state(net, optimizer):
    optimizer.consolidate_state_dict(to=None)
    state = copy.deepcopy(optimizer.state_dict())
    in_columns(net, optimizer)
    optimizer.load_state_dict(state)


def with_gaps(net, optimizer):
    net[0].bias.data = torch.stack([net[0].bias.data] * 2, dim=1)[:, 0]


def test_a_weight_that_gets_another_order_in_memory_is_refused_with_the_way_out(hvd, rank):
    with pytest.raises(HvdTrainError, match=rf"another order in memory\. Received: shape \(147, 6\).*on rank {rank}"):
        trained(hvd, shard=True, relaid=in_columns)
    with pytest.raises(ValueError, match="must be dense in memory"):
        trained(hvd, shard=True, relaid=with_gaps)
    ours, right = trained(hvd, shard=True, relaid=in_columns_with_whole_state), trained(hvd, shard=False)
    for mine, theirs in zip(ours, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
