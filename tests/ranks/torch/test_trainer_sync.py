"""Strategies of synchronization in PyTorch: what is learned, what is sent."""

from __future__ import annotations

import copy
import socket

import numpy as np
import pytest
import torch
import trainer_kit as kit
from torch.nn.functional import cross_entropy
from trainer_kit import BATCH, assert_close, data, fit, model

import hvdtrain
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.ops import engine
from hvdtrain.torch.reduction.weight_access import Changes, WeightAccess


def alone(optimizer, groups, *, every, after=0, lr=1.0, momentum=0.0, clip_norm=None, epochs=2):
    """Train in one process as groups of ranks do that step together: each group its own model, averaged by hand."""
    x, y = data()
    nets = [model() for _ in groups]
    optimizers = [kit.OPTIMIZERS[optimizer](net) for net in nets]
    anchor = [p.detach().clone() for p in nets[0].parameters()]
    velocity = [torch.zeros_like(p) for p in anchor]
    size, steps = sum(map(len, groups)), 0

    def mean(values):
        return sum(len(group) / size * each for group, each in zip(groups, values, strict=True))

    def synchronize():
        for index, parameters in enumerate(zip(*(net.parameters() for net in nets), strict=True)):
            change = mean([p.detach() - anchor[index] for p in parameters])
            velocity[index] = momentum * velocity[index] + change
            anchor[index] = anchor[index] + lr * (change + momentum * velocity[index])
            for p in parameters:
                p.detach().copy_(anchor[index])
            states = [each.state[p] for each, p in zip(optimizers, parameters, strict=True)]
            for name in [name for name, value in states[0].items() if torch.is_tensor(value) and value.dim()]:
                average = mean([state[name] for state in states])
                for state in states:
                    state[name].copy_(average)

    for epoch in range(epochs):
        for rows in kit.global_batches(epoch, BATCH * size):
            synchronous = steps < after
            for group, net, own in zip(groups, nets, optimizers, strict=True):
                mine = rows if synchronous else np.concatenate([rows[rank::size] for rank in group])
                loss = cross_entropy(net(x[mine]), y[mine], reduction="sum")
                kit.take_step(net, own, loss * (1 if synchronous else size / len(group)) / len(rows), clip_norm)
            steps += 1
            due = not synchronous and (steps - after) % every == 0
            if due:
                synchronize()
            elif synchronous:
                anchor = [p.detach().clone() for p in nets[0].parameters()]
        if not due:
            synchronize()
    return anchor


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    ("optimizer", "sync", "how"),
    [
        ("sgd", hvdtrain.LocalSGD(4), {"every": 4}),
        ("momentum", hvdtrain.LocalSGD(2, after_steps=3), {"every": 2, "after": 3}),
        ("adam", hvdtrain.LocalSGD(3), {"every": 3, "clip_norm": 0.1}),
        ("adam", hvdtrain.DiLoCo(3, lr=0.7, momentum=0.9), {"every": 3, "lr": 0.7, "momentum": 0.9}),
    ],
)
def test_weights_are_those_of_ranks_that_step_alone_and_are_averaged(world, optimizer, sync, how):
    net = model()
    fit(net, optimizer, sync=sync, clip_norm=how.get("clip_norm"))
    assert_close(net, alone(optimizer, [[rank] for rank in range(world.size)], **how))


HOST_OF = {2: "aa", 3: "aab"}  # by world size, each rank's


@pytest.fixture
def two_hosts(world, monkeypatch):
    """Let ranks be on hosts of their own names."""
    names = HOST_OF[world.size]
    monkeypatch.setattr(socket, "gethostname", lambda: names[world.rank])
    return [[rank for rank, name in enumerate(names) if name == host] for host in sorted(set(names))]


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_ranks_of_a_host_step_together_and_hosts_alone(world, two_hosts, monkeypatch, optimizer):
    sent = []
    alltoall = engine.native().alltoall_async
    monkeypatch.setattr(
        engine.native(),
        "alltoall_async",
        lambda rows, splits, **how: sent.append(splits) or alltoall(rows, splits, **how),
    )
    net = model()
    fit(net, optimizer, sync=hvdtrain.LocalSGD(3, within="host"))
    assert_close(net, alone(optimizer, two_hosts, every=3))
    (mine,) = (host for host in two_hosts if world.rank in host)
    assert sent
    for splits in sent:
        assert [rank for rank, rows in enumerate(splits.tolist()) if rows] == mine, "nothing goes to other hosts"


@pytest.mark.world_size(2)
def test_a_weight_that_one_rank_of_a_host_trains_is_stepped_on_all_of_them(world, two_hosts):
    net = kit.Partly(world.rank)
    before = copy.deepcopy(net.state_dict())
    steps = []

    class Equal(hvdtrain.callbacks.Callback):
        def on_step_end(self, trainer, step):
            sums = world.allgather_object(float(net.sometimes.weight.detach().sum()), name="sums")
            steps.append(sums[0] == sums[1])

    fit(net, "adam", sync=hvdtrain.LocalSGD(100, within="host"), epochs=1, hooks=[Equal()])
    assert steps == [True] * 6
    assert not torch.equal(net.sometimes.weight, before["sometimes.weight"])
    assert torch.equal(net.never.weight, before["never.weight"])


@pytest.mark.world_size(2)
def test_sparse_gradients_within_a_host_are_refused(world, two_hosts):
    with pytest.raises(HvdTrainError, match=r'within="host"\) averages dense.*sparse gradient of 0\.weight on rank \d'):
        fit(kit.sparse_model(), "sgd", kit.sparse_data(8), sync=hvdtrain.LocalSGD(2, within="host"))


def elements_sent(monkeypatch, run):
    """Return the numbers that Horovod is given to add up, and in what types."""
    native, sent = engine.native(), []
    send = native.allreduce_async_

    def count(tensor, *args, **kwargs):
        sent.append((tensor.numel(), tensor.dtype))
        return send(tensor, *args, **kwargs)

    monkeypatch.setattr(native, "allreduce_async_", count)
    run()
    monkeypatch.undo()
    return sent


@pytest.mark.world_size(2)
def test_traffic_falls_with_the_number_of_steps_between_synchronizations(world, monkeypatch):
    steps, weights = 12, sum(p.numel() for p in model().parameters())  # 46 samples: six steps an epoch

    def numbers(optimizer, sync):
        net = model()
        sent = elements_sent(monkeypatch, lambda: fit(net, optimizer, sync=sync))
        return sum(number for number, _ in sent if number >= weights // 4)

    assert numbers("sgd", None) >= steps * weights
    assert numbers("sgd", hvdtrain.LocalSGD(3)) == steps // 3 * weights
    assert numbers("momentum", hvdtrain.LocalSGD(3)) == steps // 3 * weights * 2
    assert numbers("adam", hvdtrain.DiLoCo(6)) == steps // 6 * weights * 3


@pytest.mark.world_size(2)
def test_compression_sends_changes_in_half_and_moments_in_bfloat16(world, monkeypatch):
    net, weights = model(), sum(p.numel() for p in model().parameters())
    sync = hvdtrain.LocalSGD(3)
    sent = elements_sent(monkeypatch, lambda: fit(net, "adam", sync=sync, compression="fp16"))
    assert [dtype for number, dtype in sent if number == weights] == [torch.float16] * 4
    reference = model()
    fit(reference, "adam", sync=sync)
    assert_close(net, reference, atol=1e-3)


@pytest.mark.world_size(2)
def test_a_weight_that_one_rank_trains_has_the_same_state_on_all(world):
    net = kit.Partly(world.rank)
    before = copy.deepcopy(net.state_dict())
    trainer = fit(net, "adam", sync=hvdtrain.LocalSGD(3))
    arrays = trainer.state().arrays
    everyones = world.allgather_object({name: float(np.sum(array)) for name, array in arrays.items()}, name="states")
    assert everyones[0] == everyones[1]
    assert not torch.equal(net.sometimes.weight, before["sometimes.weight"])
    assert torch.equal(net.never.weight, before["never.weight"])


@pytest.mark.world_size(2)
def test_loss_scales_and_counters_become_equal(world):
    net = model()
    overflow = kit.Infinite(next(net.parameters()), [1])  # this rank's scaler skips the step, the other's does not
    trainer = fit(net, "adam", sync=hvdtrain.LocalSGD(2), precision="fp16", epochs=1, hooks=[overflow])
    metas = world.allgather_object(trainer.state().meta, name="metas")
    assert metas[0] == metas[1]
    assert metas[0]["scaler"]["scale"] == 32768.0


@pytest.mark.world_size(2)
def test_ignored_labels_count_on_the_rank_that_has_them(world):
    """A rank's own step is a mean over its own labels, times its share of the samples."""
    x, y = data()
    y[::3] = -100
    net = model()
    fit(net, "sgd", (x[:8], y[:8]), sync=hvdtrain.LocalSGD(1), epochs=1)
    (order,) = kit.global_batches(0, 8, num_samples=8)
    others = [model(), model()]
    for rank, other in enumerate(others):
        rows = order[rank::2]
        kit.take_step(other, kit.OPTIMIZERS["sgd"](other), cross_entropy(other(x[rows]), y[rows]))
    expected = [(first + second) / 2 for first, second in zip(*(each.parameters() for each in others), strict=True)]
    assert_close(net, expected, atol=1e-6)


def streamed(size, *, every, fragments, overlap, lr=0.7, momentum=0.9, epochs=2):
    """Train in one process as ranks do that exchange fragments of their weights while steps go on; plain SGD."""
    x, y = data()
    nets = [model() for _ in range(size)]
    optimizers = [kit.OPTIMIZERS["sgd"](net) for net in nets]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    whole = WeightAccess({"": (optimizers[0], scaler)}, hvdtrain.init("torch"), Changes({}, "none"))
    parts = whole.parts(fragments)
    where = [[i for i, p in enumerate(nets[0].parameters()) if any(p is each for each in part._only)] for part in parts]
    anchor = [p.detach().clone() for p in nets[0].parameters()]
    velocity = [torch.zeros_like(p) for p in anchor]
    flights = {}  # fragment -> the step after which it ends, and each rank's weights when it began
    steps = alone = 0

    def weights():
        return [[p.detach().clone() for p in net.parameters()] for net in nets]

    def finish(fragment):
        _, sent = flights.pop(fragment)
        for i in where[fragment]:
            change = torch.stack([each[i] - anchor[i] for each in sent]).mean(0)
            velocity[i] = momentum * velocity[i] + change
            anchor[i] = anchor[i] + lr * (change + momentum * velocity[i])
            for net, each in zip(nets, sent, strict=True):
                p = list(net.parameters())[i].detach()
                p.copy_(anchor[i] + (p - each[i]))

    for epoch in range(epochs):
        for rows in kit.global_batches(epoch, BATCH * size):
            for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                mine = rows[rank::size]
                loss = cross_entropy(net(x[mine]), y[mine], reduction="sum")
                kit.take_step(net, optimizer, loss * size / len(rows))
            steps, alone = steps + 1, alone + 1
            for fragment in range(fragments):
                if fragment in flights and steps >= flights[fragment][0]:
                    finish(fragment)
                if steps % every == (fragment + 1) * every // fragments % every:
                    flights[fragment] = (steps + overlap, weights())
                    if not overlap:
                        finish(fragment)
        for fragment in list(flights):
            finish(fragment)
        for fragment in range(fragments):
            flights[fragment] = (steps, weights())
            finish(fragment)
    return anchor


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("every", "fragments", "overlap"), [(4, 2, 1), (3, 1, 2), (2, 2, 0)])
def test_fragments_are_exchanged_while_steps_go_on(world, every, fragments, overlap):
    net = model()
    sync = hvdtrain.DiLoCo(every, lr=0.7, momentum=0.9, fragments=fragments, overlap=overlap)
    fit(net, "sgd", sync=sync)
    assert_close(net, streamed(world.size, every=every, fragments=fragments, overlap=overlap))


@pytest.mark.world_size(2)
def test_no_step_waits_for_an_exchange_that_is_in_flight(world, monkeypatch):
    events = []
    mean = WeightAccess.mean

    def noted(self, arrays, *, name, compression):
        wait = mean(self, arrays, name=name, compression=compression)
        events.append(f"start {name}")
        return lambda: events.append(f"wait {name}") or wait()

    class Steps(hvdtrain.callbacks.Callback):
        def on_step_begin(self, trainer, step):
            events.append("step")

    monkeypatch.setattr(WeightAccess, "mean", noted)
    trainer = kit.make_trainer(model(), "sgd", sync=hvdtrain.DiLoCo(4, overlap=2))
    kit.run(trainer, epochs=None, steps=7, batch_size=2, hooks=[Steps()])
    begin = events.index("start sync.0")
    assert events[begin : begin + 4] == ["start sync.0", "step", "step", "wait sync.0"]
