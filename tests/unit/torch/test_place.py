"""Where a model and its inputs go."""

from __future__ import annotations

import pytest
import torch
import torchmetrics

import hvdtrain
from hvdtrain.data.sources import Batch
from hvdtrain.distributed import world
from hvdtrain.torch.steps import meta_device
from hvdtrain.torch.steps.compute import LossStep
from hvdtrain.torch.steps.loss_check import LossCheck
from hvdtrain.torch.steps.stateful_metrics import StatefulMetrics
from hvdtrain.torch.steps.training_state import move_optimizer, place

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


class Spread:
    """A model over two devices, as far as `place` looks at it: this machine may have one alone."""

    def __init__(self, *devices):
        self._devices = devices
        self.moved_to = None

    def named_parameters(self):
        return [(f"{i}.weight", type("P", (), {"device": each})()) for i, each in enumerate(self._devices)]

    def to(self, device):
        self.moved_to = device


def test_a_model_on_several_devices_stays_and_its_first_layer_has_the_inputs():
    model = Spread(GPU, GPU, torch.device("cuda", 0))
    assert place(model, torch.device("cuda", 0)) == GPU
    assert model.moved_to is None


def test_targets_and_the_loss_go_to_the_outputs_of_a_spread_model():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3, device="meta"), torch.nn.Flatten())
    model.register_forward_pre_hook(lambda _, args: args[0].to("meta"))  # as a model does between its layers
    loss = torch.nn.CrossEntropyLoss(weight=torch.ones(3))
    unchecked = LossCheck(loss, world.SoloWorld(), split=False)
    step = LossStep(model, loss, lambda tree: tree, 0, unchecked)
    step._checked = True  # class indices on "meta" have no values to check
    found = step(Batch(torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64), local_count=5, global_count=5))
    assert [each.device.type for each in (found.mean, found.targets, loss.weight)] == ["meta"] * 3


def test_outputs_of_a_spread_model_go_to_the_metrics():
    class Seen(torchmetrics.Metric):
        def update(self, outputs, targets):
            self.seen = [outputs.device.type, targets["y"].device.type]

        def compute(self):
            return torch.zeros(())

    metrics = StatefulMetrics({"seen": Seen()}, torch.device("meta"), world.SoloWorld())
    metrics.update(torch.zeros(3), {"y": torch.zeros(3)})
    assert metrics._metrics[0]._metric.seen == ["meta", "meta"]


def test_a_model_on_another_device_is_moved():
    model = Spread(CPU, CPU)
    assert place(model, GPU) == GPU
    assert model.moved_to == GPU


def test_a_model_without_values_is_refused():
    world.use(world.SoloWorld())
    try:
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3, device="meta"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r'Received: 1\.weight on the device "meta" on rank 0\. Make it'):
            hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())
    finally:
        world.use(None)


def test_an_elastic_jobs_rank_has_a_model_with_values(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    net = torch.nn.Linear(4, 3, device="meta")
    with pytest.raises(ValueError, match=r'weight on the device "meta" on rank 0.*in an elastic job on all ranks'):
        meta_device.place(net, [], CPU, world.SoloWorld())


def test_an_optimizers_state_goes_where_its_parameters_are():
    here, there = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.Adam([here, there])
    for each in (here, there):
        optimizer.state[each] = {"step": torch.zeros(()), "exp_avg": torch.zeros(2)}
    move_optimizer(optimizer)
    assert [optimizer.state[each]["exp_avg"].device.type for each in (here, there)] == ["cpu", "meta"]
    assert all(state["step"].device.type == "cpu" for state in optimizer.state.values())
