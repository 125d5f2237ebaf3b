"""After the first steps a step reads nothing from its device, on which the host would wait for a GPU.

The "meta" device stands for a GPU: it computes shapes and no values, and raises where somebody asks for one (item,
bool, tolist, cpu, numpy, nonzero, boolean indexing, unique, equal). No GPU has run this: tests/gpu/test_async_step.py
is for one. The optimizer's reducer runs too, over one process.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from hvdtrain.adapter import Loss, Options
from hvdtrain.data.sources import Batch
from hvdtrain.distributed.world import SoloWorld
from hvdtrain.torch.adapter import TorchAdapter, make_adapter
from hvdtrain.torch.ops import sync_batch_norm
from hvdtrain.torch.ops.sync_batch_norm import SyncBatchNorm
from hvdtrain.torch.reduction.exchange import DenseOnly
from hvdtrain.torch.reduction.host_mean import HostMean
from hvdtrain.torch.steps import compute, update

ROWS = 6


@pytest.fixture(params=["alone", "reduced"])
def reduced(request: pytest.FixtureRequest, hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test without and with a reducer."""
    if request.param == "reduced":
        monkeypatch.setenv("HVDTRAIN_REDUCE_ALONE", "1")


@pytest.fixture
def values_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first batch's labels be looked at, which is done once."""
    monkeypatch.setattr(compute, "check_shapes", lambda *_, **__: None)


def batch(targets: Any, *, inputs: Any = None, held: int = ROWS) -> Batch:
    inputs = np.ones((ROWS, 3, 8, 8), np.float32) if inputs is None else inputs
    return Batch(inputs, targets, local_count=held, global_count=held)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 5)
    )


def adapter(
    loss: Any, *, net: Any = None, kind: Any = torch.optim.SGD, metrics: Any = (), step: Any = None, **options: Any
) -> TorchAdapter:
    net = (net or model()).to("meta")  # there before the optimizer: to "meta" a parameter becomes another one
    optimizer = kind(net.parameters(), lr=0.1)
    made = make_adapter(
        net,
        optimizer=optimizer,
        loss=loss,
        step=step,
        metrics=metrics,
        options=Options(**options),
        world=SoloWorld("meta"),
    )
    assert all(p.is_meta for p in net.parameters())
    return made


LABELS = np.array([0, 1, -100, 4, 2, -100])


@pytest.mark.parametrize(
    "targets", [LABELS, np.arange(ROWS) % 5, torch.from_numpy(LABELS)], ids=["ignored", "all", "tensor"]
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.usefixtures("reduced", "values_are_read")
def test_a_step_of_a_classifier_reads_nothing(kind: Any, targets: Any) -> None:
    made = adapter(torch.nn.CrossEntropyLoss(), kind=kind, metrics=["accuracy"], clip_norm=1.0, accumulate=2)
    for _ in range(3):
        made.train_step([batch(targets), batch(targets)])


@pytest.mark.usefixtures("reduced", "values_are_read")
def test_a_loss_that_sums_and_ignores_reads_nothing() -> None:
    made = adapter(torch.nn.CrossEntropyLoss(reduction="sum"), metrics=["accuracy"])
    for _ in range(2):
        made.train_step([batch(LABELS)])


@pytest.mark.usefixtures("reduced")
def test_a_step_of_a_regression_reads_nothing() -> None:
    net = torch.nn.Linear(4, 2)
    made = adapter(torch.nn.MSELoss(), net=net, metrics=["mse", "mae"], kind=torch.optim.Adam)
    for _ in range(3):
        made.train_step([batch(np.zeros((ROWS, 2), np.float32), inputs=np.ones((ROWS, 4), np.float32))])


@pytest.mark.parametrize("kernels", ["portable", "as on CUDA"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.usefixtures("hvd", "values_are_read")
def test_norms_over_all_ranks_read_nothing(
    momentum: float | None, kernels: str, monkeypatch: pytest.MonkeyPatch, load_script: Any
) -> None:
    monkeypatch.setenv("HVDTRAIN_REDUCE_ALONE", "1")
    if kernels == "as on CUDA":
        strict = load_script("ranks/torch/cuda_norm_kernels.py").STRICT
        monkeypatch.setattr(sync_batch_norm, "kernels_for", lambda tensor: strict)
    net = model()
    net[1] = SyncBatchNorm(4, momentum=momentum)
    made = adapter(torch.nn.CrossEntropyLoss(), net=net)
    for _ in range(2):
        made.train_step([batch(LABELS)])


@pytest.mark.parametrize("targets", ["meta", "host"])
@pytest.mark.usefixtures("reduced", "values_are_read")
def test_labels_on_the_device_are_read_where_their_count_divides_the_loss(targets: str) -> None:
    """Whether a rank has any that count decides on the host whether it goes forward; see docs/pages/speed.md."""
    labels = batch(torch.from_numpy(LABELS).to("meta" if targets == "meta" else "cpu"))
    adapter(torch.nn.CrossEntropyLoss(reduction="sum"), metrics=["accuracy"]).train_step([labels])
    made = adapter(torch.nn.CrossEntropyLoss(), metrics=["accuracy"])
    with pytest.raises((RuntimeError, NotImplementedError), match="meta") if targets == "meta" else nullcontext():
        made.train_step([labels])


@pytest.mark.usefixtures("reduced")
def test_a_step_of_the_users_own_reads_nothing_if_its_count_is_a_number() -> None:
    net = torch.nn.Linear(4, 2)

    def step(model: Any, batch: Any) -> Loss:
        return Loss(model(batch["x"]).mean(), 3)

    made = adapter(None, net=net, step=step)
    given = Batch(item={"x": np.ones((ROWS, 4), np.float32)}, local_count=ROWS, global_count=ROWS)
    for _ in range(3):
        made.train_step([given])


@pytest.mark.parametrize("policy", ["raise", "skip", "stop"])
@pytest.mark.usefixtures("reduced", "values_are_read")
def test_a_policy_reads_one_flag_a_step(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(update, "all_finite", lambda gradients: looked.append(len(gradients)) or True)
    made = adapter(torch.nn.CrossEntropyLoss(), nan_policy=policy, metrics=["accuracy"], clip_norm=1.0, accumulate=2)
    for _ in range(3):
        made.train_step([batch(LABELS), batch(LABELS)])
    assert looked == [6] * 3  # parameters


def test_that_flag_decides_whether_the_step_is_taken() -> None:
    made = adapter(torch.nn.MSELoss(), net=torch.nn.Linear(4, 2), nan_policy="raise")
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        made.train_step([batch(np.zeros((ROWS, 2), np.float32), inputs=np.ones((ROWS, 4), np.float32))])


@pytest.mark.usefixtures("hvd")
def test_the_mean_over_a_host_reads_nothing() -> None:
    """Whether a rank of the host has a gradient is asked on the host."""
    net = model().to("meta")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    *used, unused = net.parameters()
    for parameter in used:
        parameter.grad = torch.ones_like(parameter)
    within = DenseOnly("the test", "nothing", {}, SoloWorld("meta"))
    HostMean(optimizer, within, SoloWorld("meta")).average(list(net.parameters()))
    assert unused.grad is None


def test_what_is_read_raises_here() -> None:
    tensor = torch.ones(3, device="meta")
    reads: list[Any] = [
        lambda: tensor[0].item(), lambda: bool(tensor.sum() > 0), lambda: tensor.tolist(), lambda: tensor.cpu(),
        lambda: tensor.numpy(), lambda: tensor.nonzero(), lambda: tensor[tensor > 0], lambda: tensor.unique(),
        lambda: torch.equal(tensor, tensor), lambda: torch.zeros(3).copy_(tensor),
    ]  # fmt: skip
    for read in reads:
        with pytest.raises((RuntimeError, TypeError)):
            read()


@pytest.mark.usefixtures("reduced", "values_are_read")
@pytest.mark.parametrize("compression", ["bf16", "int8", "topk:0.1", "powersgd:1:1"])
def test_compression_reads_nothing_here(compression: str) -> None:
    """On a GPU, NCCL's stream waits for the default stream, on which Horovod allocates what alltoall returns."""
    made = adapter(torch.nn.CrossEntropyLoss(), compression=compression)
    for _ in range(3):
        made.train_step([batch(LABELS)])
