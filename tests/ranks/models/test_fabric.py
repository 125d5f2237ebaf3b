"""Lightning's Fabric, as its users train with it: N ranks train the weights of one process."""

from __future__ import annotations

import time

import pytest
import torch
from lightning.fabric import Fabric
from lightning_kit import BATCH, CLASSES, MARKS, assert_equal, data
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric

import hvdtrain.lightning  # noqa: F401 - registers strategy="horovod"
import hvdtrain.torch as hvd

pytestmark = [pytest.mark.world_size(2, 3), *MARKS]


def launched():
    """Return a Fabric of the ranks."""
    fabric = Fabric(strategy="horovod", accelerator="cpu")
    fabric.launch()
    return fabric


def fabric_run(fabric, model, *, batch, accumulate=1, epochs=2):
    """Train as a user of Fabric does; return the optimizer, and a gradient before it is averaged."""
    local = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    order = DistributedSampler(data(48), num_replicas=fabric.world_size, rank=fabric.global_rank, shuffle=True)
    loader = fabric.setup_dataloaders(DataLoader(data(48), batch_size=batch, sampler=order))
    for _ in range(epochs):
        for index, (x, y) in enumerate(loader):
            is_last = (index + 1) % accumulate == 0
            with fabric.no_backward_sync(model, enabled=not is_last):
                fabric.backward(cross_entropy(model(x), y) / accumulate)
            if not is_last:
                local = next(model.parameters()).grad.clone()
            else:
                fabric.clip_gradients(model, optimizer, max_norm=0.1)
                optimizer.step()
                optimizer.zero_grad()
    return optimizer, local


@pytest.mark.parametrize("accumulate", [1, 2])
def test_fabric_trains_the_weights_of_one_process(world, shared_tmp_path, accumulate):
    def net(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES))

    ours, alone = net(world.rank), net(0)
    fabric = launched()
    assert (fabric.global_rank, fabric.world_size) == (world.rank, world.size)
    optimizer, local = fabric_run(fabric, ours, batch=BATCH, accumulate=accumulate)
    fabric_run(Fabric(accelerator="cpu", devices=1), alone, batch=BATCH * world.size, accumulate=accumulate)
    assert_equal(ours, alone)
    assert accumulate == 1 or len({str(each) for each in hvd.allgather_object(local)}) == world.size
    fabric.save(shared_tmp_path / "fabric.ckpt", {"model": ours, "optimizer": optimizer})
    fabric.barrier()
    held = torch.load(shared_tmp_path / "fabric.ckpt", weights_only=True)
    torch.optim.SGD(alone.parameters()).load_state_dict(held["optimizer"])
    metric = MeanMetric()
    assert float(fabric.all_reduce(torch.tensor(float(world.rank)), reduce_op="sum")) == sum(range(world.size))
    fabric.strategy.setup_module(metric)
    metric.update(world.rank)
    assert float(metric.compute()) == (world.size - 1) / 2


@pytest.mark.world_size(2)
def test_fabrics_collectives_do_what_its_documentation_says(world):
    fabric = launched()
    value = torch.tensor(float(world.rank))
    fabric.all_reduce(value, reduce_op="sum")  # in place
    assert float(value) == sum(range(world.size))
    with fabric.rank_zero_first():
        if world.is_root:
            time.sleep(0.3)
        entered = time.time()
    times = hvd.allgather_object(entered)
    assert times[0] <= min(times[1:])


@pytest.mark.world_size(2)
def test_a_checkpoint_of_fabric_has_the_mean_of_running_statistics(world, shared_tmp_path):
    fabric = launched()
    norm = fabric.setup(torch.nn.BatchNorm1d(6))
    x, _ = data(48)[:]
    norm(x[world.rank :: world.size])
    fabric.save(shared_tmp_path / "norm.ckpt", {"norm": norm})
    fabric.barrier()
    saved = torch.load(shared_tmp_path / "norm.ckpt", weights_only=True)["norm"]
    torch.testing.assert_close(saved["running_mean"], 0.1 * x.mean(0))


@pytest.mark.world_size(2)
def test_ranks_may_make_gradients_of_different_optimizers(world):
    def train(fabric, losses_of):
        torch.manual_seed(0)
        nets = [torch.nn.Linear(6, CLASSES) for _ in range(2)]
        held = [fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
        for number in range(4):
            for _, optimizer in held:
                optimizer.zero_grad()
            fabric.backward(sum(losses_of(held, number)))
            for _, optimizer in held:
                optimizer.step()
        return torch.nn.ModuleList(nets)

    def loss(held, number, rank):
        x, y = data()[number * 8 + rank : number * 8 + 8 : world.size]
        return cross_entropy(held[(number + rank) % 2][0](x), y)

    ours = train(launched(), lambda held, number: [loss(held, number, world.rank)])
    alone = train(
        Fabric(accelerator="cpu", devices=1),
        lambda held, number: [loss(held, number, rank) / world.size for rank in range(world.size)],
    )
    assert_equal(ours, alone)


@pytest.mark.world_size(2)
def test_samples_that_fabric_repeats_are_named(world, caplog):
    launched().setup_dataloaders(DataLoader(data(49), batch_size=4))
    assert world.is_root == any("repeats 1 sample" in each for each in caplog.messages)
