"""The gradient of the step before, on several ranks: what is learned, what is in flight, what refuses a step."""

from __future__ import annotations

import pytest
import torch
import trainer_kit as kit
from trainer_kit import BATCH, SAMPLES, assert_close, data, model

import hvdtrain
from hvdtrain import callbacks
from hvdtrain.distributed.world import World
from hvdtrain.telemetry import interval
from hvdtrain.torch.reduction.delayed import Delayed as DelayedExchange


def fit(net, train=None, **options):
    return kit.fit(net, train=train, sync=hvdtrain.Delayed(), **options)


def delayed_loop(net, size, *, num_samples=SAMPLES, accumulate=1, clip_norm=None, epochs=2, weight=None):
    """Apply each global gradient one step late, in one process."""
    x, y = data(num_samples)
    optimizer, before = kit.OPTIMIZERS["momentum"](net), None

    def apply(gradients):
        if gradients is not None:
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.grad = gradient
            if clip_norm:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
            optimizer.step()

    for epoch in range(epochs):
        for rows in kit.global_batches(epoch, BATCH * size * accumulate, num_samples):
            loss, _ = kit.mean_loss(net, (x[rows], y[rows]), weight)
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            apply(before)
            before = gradients
    apply(before)
    return net


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    ("num_samples", "options", "atol"),
    [
        (SAMPLES, {}, 2e-6),
        (SAMPLES, {"accumulate": 3, "clip_norm": 0.05}, 2e-6),
        (2, {}, 2e-6),  # fewer samples than three ranks
        (SAMPLES, {"compression": "fp16"}, 2e-3),
        (SAMPLES, {"compression": "bf16"}, 2e-2),
    ],
)
def test_ranks_train_the_weights_of_one_process_that_delays(
    world, num_samples, options, atol, assert_same_on_all_ranks
):
    net = model()
    check = callbacks.SyncCheck(every=1)  # of every step: all ranks apply the same mean
    fit(net, data(num_samples), hooks=[check], **options)
    how = {name: value for name, value in options.items() if name != "compression"}
    assert_close(net, delayed_loop(model(), world.size, num_samples=num_samples, **how), atol)
    assert_same_on_all_ranks(*net.parameters())


@pytest.mark.world_size(2)
def test_counts_of_an_own_step_weigh_the_mean(world):
    def count(labels):
        return (labels + 1).float()

    net = model()
    fit(net, loss=None, step=kit.own_step(count))
    assert_close(net, delayed_loop(model(), world.size, weight=count))


@pytest.mark.world_size(2)
def test_a_rank_whose_gradient_is_not_finite_refuses_the_next_steps_update_on_all(world, caplog):
    net = model()
    infinite = kit.Infinite(net[-1].bias, [3])
    fit(net, hooks=[infinite], nan_policy="skip")
    assert [index for index, taken in enumerate(infinite.taken) if not taken] == [4]
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    assert not world.is_root or "a step later: on rank 1 (" in caplog.text


@pytest.mark.world_size(2)
def test_a_gradient_is_in_flight_while_the_next_step_computes_but_not_in_a_heartbeat(world, monkeypatch):
    events = []
    reduce = World.allreduce

    def allreduce(self, *args, name="host", **kwargs):
        events.extend([name] if name in ("heartbeat", "running") else [])
        return reduce(self, *args, name=name, **kwargs)

    monkeypatch.setattr(World, "allreduce", allreduce)
    monkeypatch.setattr(interval, "INTERVAL_S", 0.0)  # a heartbeat in each step
    for name in ("_send", "_take"):
        whole = getattr(DelayedExchange, name)
        monkeypatch.setattr(
            DelayedExchange, name, lambda self, *a, _name=name, _whole=whole: events.append(_name) or _whole(self, *a)
        )
    net = model()
    net.register_forward_pre_hook(lambda *_: events.append("forward"))
    fit(net, data(24), epochs=1)
    assert events == ["forward", "_take", "heartbeat", "running", "_send"] * 3 + ["_take"]


@pytest.mark.world_size(2)
def test_a_parameter_that_one_rank_uses_gets_the_mean_and_one_that_none_uses_stays(world, assert_same_on_all_ranks):
    net = kit.Partly(world.rank)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    fit(net)
    assert torch.equal(net.never.weight, before["never.weight"])
    assert not torch.equal(net.sometimes.weight, before["sometimes.weight"])
    assert_same_on_all_ranks(*net.parameters())
