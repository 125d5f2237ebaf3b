"""Strategies of synchronization in PyTorch: what is learned, what is sent."""

from __future__ import annotations

import copy
import socket

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.data import sharding
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch import engine
from hvdtrain.torch.replica import Replica

BATCH, SAMPLES = 4, 46

OPTIMIZERS = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.01),
}


@pytest.fixture
def world(hvd):
    return hvdtrain.init("torch")


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def data():
    generator = np.random.default_rng(1)
    return generator.normal(size=(SAMPLES, 6)).astype(np.float32), generator.integers(0, 3, SAMPLES)


def fit(net, optimizer, sync, *, epochs=2, **options):
    trainer = hvdtrain.Trainer(net, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), sync=sync, **options)
    trainer.fit(data(), epochs=epochs, batch_size=BATCH, progress=False, run_dir=None)
    return trainer


def ranks_alone(make, size, *, every, after, lr=1.0, momentum=0.0, clip_norm=None, epochs=2):
    """Train as `size` ranks do, in one process: each its own model, and all of them averaged by hand."""
    x, y = map(torch.from_numpy, data())
    nets = [model() for _ in range(size)]
    optimizers = [make(net) for net in nets]
    anchor = [p.detach().clone() for p in nets[0].parameters()]
    velocity = [torch.zeros_like(p) for p in anchor]
    steps = 0

    def synchronize():
        for index, parameters in enumerate(zip(*(net.parameters() for net in nets), strict=True)):
            change = torch.stack([p.detach() - anchor[index] for p in parameters]).mean(0)
            velocity[index] = momentum * velocity[index] + change
            anchor[index] = anchor[index] + lr * (change + momentum * velocity[index])
            for p in parameters:
                p.detach().copy_(anchor[index])
            states = [optimizer.state[p] for optimizer, p in zip(optimizers, parameters, strict=True)]
            for name in [name for name, value in states[0].items() if torch.is_tensor(value) and value.dim()]:
                mean = torch.stack([state[name] for state in states]).mean(0)
                for state in states:
                    state[name].copy_(mean)

    for epoch in range(epochs):
        order = sharding.epoch_order(SAMPLES, epoch=epoch, seed=0)
        for begin in range(0, SAMPLES, BATCH * size):
            rows = order[begin : begin + BATCH * size]
            synchronous = steps < after
            for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                mine = rows if synchronous else rows[rank::size]
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(net(x[mine]), y[mine], reduction="sum")
                (loss * (1 if synchronous else size) / len(rows)).backward()
                if clip_norm:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
                optimizer.step()
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
        ("sgd", hvdtrain.LocalSGD(4), {"every": 4, "after": 0}),
        ("momentum", hvdtrain.LocalSGD(2, after_steps=3), {"every": 2, "after": 3}),
        ("adam", hvdtrain.LocalSGD(3), {"every": 3, "after": 0, "clip_norm": 0.1}),
        ("adam", hvdtrain.DiLoCo(3, lr=0.7, momentum=0.9), {"every": 3, "after": 0, "lr": 0.7, "momentum": 0.9}),
    ],
)
def test_weights_are_those_of_ranks_that_step_alone_and_are_averaged(world, optimizer, sync, how):
    net = model()
    fit(net, OPTIMIZERS[optimizer](net), sync, clip_norm=how.get("clip_norm"))
    expected = ranks_alone(OPTIMIZERS[optimizer], world.size, **how)
    for ours, theirs in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, atol=2e-6, rtol=0)


HOST_OF = {2: "aa", 3: "aab"}  # by world size, each rank's


@pytest.fixture
def two_hosts(world, monkeypatch):
    """Let ranks be on hosts of their own names."""
    names = HOST_OF[world.size]
    monkeypatch.setattr(socket, "gethostname", lambda: names[world.rank])
    return [[rank for rank, name in enumerate(names) if name == host] for host in sorted(set(names))]


def hosts_alone(make, hosts, *, every, epochs=2):
    """Train as hosts do whose ranks step together, in one process: each its own model, averaged by their ranks."""
    x, y = map(torch.from_numpy, data())
    nets = [model() for _ in hosts]
    optimizers = [make(net) for net in nets]
    size, steps = sum(map(len, hosts)), 0

    def synchronize():
        for parameters in zip(*(net.parameters() for net in nets), strict=True):
            states = [optimizer.state[p] for optimizer, p in zip(optimizers, parameters, strict=True)]
            names = [name for name, value in states[0].items() if torch.is_tensor(value) and value.dim()]
            for same in ([p.detach() for p in parameters], *([state[name] for state in states] for name in names)):
                mean = sum(len(host) / size * each for host, each in zip(hosts, same, strict=True))
                for each in same:
                    each.copy_(mean)

    for epoch in range(epochs):
        order = sharding.epoch_order(SAMPLES, epoch=epoch, seed=0)
        for begin in range(0, SAMPLES, BATCH * size):
            rows = order[begin : begin + BATCH * size]
            for host, net, optimizer in zip(hosts, nets, optimizers, strict=True):
                mine = np.concatenate([rows[rank::size] for rank in host])
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(net(x[mine]), y[mine], reduction="sum")
                (loss * size / len(rows) / len(host)).backward()
                optimizer.step()
            steps += 1
            if steps % every == 0:
                synchronize()
        synchronize()
    return [p.detach() for p in nets[0].parameters()]


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
    fit(net, OPTIMIZERS[optimizer](net), hvdtrain.LocalSGD(3, within="host"))
    expected = hosts_alone(OPTIMIZERS[optimizer], two_hosts, every=3)
    for ours, theirs in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, atol=2e-6, rtol=0)
    (mine,) = (host for host in two_hosts if world.rank in host)
    assert sent
    for splits in sent:
        assert [rank for rank, rows in enumerate(splits.tolist()) if rows] == mine, "nothing goes to other hosts"


@pytest.mark.world_size(2)
def test_a_weight_that_one_rank_of_a_host_trains_is_stepped_on_all_of_them(world, two_hosts):
    net = Partly(world.rank)
    before = copy.deepcopy(net.state_dict())
    steps = []

    class Equal(hvdtrain.callbacks.Callback):
        def on_step_end(self, trainer, step):
            sums = world.allgather_object(float(net.sometimes.weight.detach().sum()), name="sums")
            steps.append(sums[0] == sums[1])

    trainer = hvdtrain.Trainer(
        net, optimizer=OPTIMIZERS["adam"](net), loss=torch.nn.CrossEntropyLoss(),
        sync=hvdtrain.LocalSGD(100, within="host"),
    )  # fmt: skip
    trainer.fit(data(), epochs=1, batch_size=BATCH, progress=False, run_dir=None, callbacks=[Equal()])
    assert steps == [True] * 6
    assert not torch.equal(net.sometimes.weight, before["sometimes.weight"])
    assert torch.equal(net.never.weight, before["never.weight"])


@pytest.mark.world_size(2)
def test_sparse_gradients_within_a_host_are_refused(world, two_hosts):
    net = torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Flatten(), torch.nn.Linear(4, 3))
    trainer = hvdtrain.Trainer(
        net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=torch.nn.CrossEntropyLoss(),
        sync=hvdtrain.LocalSGD(2, within="host"),
    )  # fmt: skip
    x = torch.arange(8)[:, None]
    with pytest.raises(HvdTrainError, match=r'within="host"\) averages dense.*sparse gradient of 0\.weight on rank \d'):
        trainer.fit((x, x[:, 0] % 3), batch_size=2, progress=False, run_dir=None)


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
        sent = elements_sent(monkeypatch, lambda: fit(net, OPTIMIZERS[optimizer](net), sync))
        return sum(number for number, _ in sent if number >= weights // 4)

    assert numbers("sgd", None) >= steps * weights
    assert numbers("sgd", hvdtrain.LocalSGD(3)) == steps // 3 * weights
    assert numbers("momentum", hvdtrain.LocalSGD(3)) == steps // 3 * weights * 2
    assert numbers("adam", hvdtrain.DiLoCo(6)) == steps // 6 * weights * 3


@pytest.mark.world_size(2)
def test_compression_sends_changes_in_half_and_moments_in_bfloat16(world, monkeypatch):
    net, weights = model(), sum(p.numel() for p in model().parameters())
    sync = hvdtrain.LocalSGD(3)
    sent = elements_sent(monkeypatch, lambda: fit(net, OPTIMIZERS["adam"](net), sync, compression="fp16"))
    assert [dtype for number, dtype in sent if number == weights] == [torch.float16] * 4
    reference = model()
    fit(reference, OPTIMIZERS["adam"](reference), sync)
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)


class Partly(torch.nn.Module):
    """A layer for one rank only, and one that no rank uses."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.never = (torch.nn.Linear(6, 3) for _ in range(3))
        self.rank = rank

    def forward(self, x):
        return self.always(x) + (self.sometimes(x) if self.rank == 1 else 0.0)


@pytest.mark.world_size(2)
def test_a_weight_that_one_rank_trains_has_the_same_state_on_all(world):
    net = Partly(world.rank)
    before = copy.deepcopy(net.state_dict())
    optimizer = OPTIMIZERS["adam"](net)
    trainer = fit(net, optimizer, hvdtrain.LocalSGD(3))
    arrays = trainer.state().arrays
    everyones = world.allgather_object({name: float(np.sum(array)) for name, array in arrays.items()}, name="states")
    assert everyones[0] == everyones[1]
    assert not torch.equal(net.sometimes.weight, before["sometimes.weight"])
    assert torch.equal(net.never.weight, before["never.weight"])


@pytest.mark.world_size(2)
def test_loss_scales_and_counters_become_equal(world):
    x, y = data()
    net = model()
    trainer = hvdtrain.Trainer(
        net, optimizer=OPTIMIZERS["adam"](net), loss=torch.nn.CrossEntropyLoss(), precision="fp16",
        sync=hvdtrain.LocalSGD(2),
    )  # fmt: skip

    class Overflow(hvdtrain.callbacks.Callback):
        def on_step_begin(self, trainer, step):
            if trainer.world.rank == 1 and step == 1:  # this rank's scaler skips the step, the other's does not
                next(net.parameters()).register_hook(
                    lambda grad: grad * float("inf") if trainer.global_step == 1 else grad
                )

    trainer.fit((x, y), epochs=1, batch_size=BATCH, progress=False, run_dir=None, callbacks=[Overflow()])
    metas = world.allgather_object(trainer.state().meta, name="metas")
    assert metas[0] == metas[1]
    assert metas[0]["scaler"]["scale"] == 32768.0


@pytest.mark.world_size(2)
def test_ignored_labels_count_on_the_rank_that_has_them(world):
    """A rank's own step is a mean over its own labels, times its share of the samples."""
    x, y = data()
    y[::3] = -100
    net = model()
    trainer = hvdtrain.Trainer(
        net, optimizer=OPTIMIZERS["sgd"](net), loss=torch.nn.CrossEntropyLoss(), sync=hvdtrain.LocalSGD(1)
    )
    trainer.fit((x[:8], y[:8]), epochs=1, batch_size=BATCH, progress=False, run_dir=None)
    order = sharding.epoch_order(8, epoch=0, seed=0)
    expected = []
    for rank in range(2):
        other = model()
        rows = order[rank::2]
        torch.nn.functional.cross_entropy(other(torch.from_numpy(x[rows])), torch.from_numpy(y[rows])).backward()
        OPTIMIZERS["sgd"](other).step()
        expected.append([p.detach() for p in other.parameters()])
    for ours, first, second in zip(net.parameters(), *expected, strict=True):
        torch.testing.assert_close(ours.detach(), (first + second) / 2, atol=1e-6, rtol=0)


def streamed(size, *, every, fragments, overlap, lr=0.7, momentum=0.9, epochs=2):
    """Train in one process as ranks do that exchange fragments of their weights while steps go on; plain SGD."""
    x, y = map(torch.from_numpy, data())
    nets = [model() for _ in range(size)]
    optimizers = [OPTIMIZERS["sgd"](net) for net in nets]
    parts = replica_of(nets[0]).parts(fragments)
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
        order = sharding.epoch_order(SAMPLES, epoch=epoch, seed=0)
        for begin in range(0, SAMPLES, BATCH * size):
            rows = order[begin : begin + BATCH * size]
            for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                mine = rows[rank::size]
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(net(x[mine]), y[mine], reduction="sum")
                (loss * size / len(rows)).backward()
                optimizer.step()
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


def replica_of(net):
    return Replica({"": (OPTIMIZERS["sgd"](net), torch.amp.GradScaler("cpu", enabled=False))}, hvdtrain.init("torch"))


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("every", "fragments", "overlap"), [(4, 2, 1), (3, 1, 2), (2, 2, 0)])
def test_fragments_are_exchanged_while_steps_go_on(world, every, fragments, overlap):
    net = model()
    sync = hvdtrain.DiLoCo(every, lr=0.7, momentum=0.9, fragments=fragments, overlap=overlap)
    fit(net, OPTIMIZERS["sgd"](net), sync)
    expected = streamed(world.size, every=every, fragments=fragments, overlap=overlap)
    for ours, theirs in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, atol=2e-6, rtol=0)


@pytest.mark.world_size(2)
def test_no_step_waits_for_an_exchange_that_is_in_flight(world, monkeypatch):
    events = []
    mean = Replica.mean

    def noted(self, arrays, *, name, compression):
        wait = mean(self, arrays, name=name, compression=compression)
        events.append(f"start {name}")
        return lambda: events.append(f"wait {name}") or wait()

    class Steps(hvdtrain.callbacks.Callback):
        def on_step_begin(self, trainer, step):
            events.append("step")

    monkeypatch.setattr(Replica, "mean", noted)
    net = model()
    trainer = hvdtrain.Trainer(
        net, optimizer=OPTIMIZERS["sgd"](net), loss=torch.nn.CrossEntropyLoss(), sync=hvdtrain.DiLoCo(4, overlap=2)
    )
    trainer.fit(data(), steps=7, batch_size=2, progress=False, run_dir=None, callbacks=[Steps()])
    begin = events.index("start sync.0")
    assert events[begin : begin + 4] == ["start sync.0", "step", "step", "wait sync.0"]
