"""Bad input is a clear error, on every rank."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hvdtrain
from hvdtrain.distributed import world
from hvdtrain.errors import DesyncError

pytestmark = [pytest.mark.world_size(2, 3), pytest.mark.over_gloo]


@pytest.mark.parametrize(("width", "expected"), [
    (lambda rank: 3 + rank, r"rank 0 has 0.weight of shape \(3, 4\).*rank 1 has 0.weight of shape \(4, 4\)"),
])  # fmt: skip
def test_different_models_are_an_error_that_names_the_first_parameter(hvd, rank, width, expected):
    model = torch.nn.Sequential(torch.nn.Linear(4, width(rank)))
    with pytest.raises(DesyncError, match=expected):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())


def test_one_layer_more_on_the_last_rank_is_an_error_everywhere(hvd, rank, size):
    layers = [torch.nn.Linear(2, 2) for _ in range(2 if rank == size - 1 else 1)]
    model = torch.nn.Sequential(*layers)
    with pytest.raises(DesyncError, match=f"Parameter 3: rank 0 has none, rank {size - 1} has 1.weight"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())


def test_different_types_are_an_error(hvd, rank):
    model = torch.nn.Linear(2, 2).to(torch.float64 if rank else torch.float32)
    with pytest.raises(DesyncError, match=r"float32.*float64"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())


def test_types_that_have_no_sum_are_an_error_before_anything_is_sent(hvd):
    with pytest.raises(TypeError, match="bool cannot be reduced"):
        hvd.allreduce(torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize("collective", ["allreduce_", "broadcast_"])
def test_a_tensor_on_a_gpu_is_refused_at_once_where_horovod_has_no_gpu_operations(hvd, rank, collective):
    if hvd.cuda_built():
        pytest.skip("this Horovod has GPU operations")
    # A tensor without memory, which says of itself that it is on a GPU.
    with FakeTensorMode():
        tensor = torch.ones(3, device="cuda")
        with pytest.raises(
            ValueError, match=rf"rank {rank}: .*no GPU operations.*cuda:0.*hvdtrain build.*CUDA_VISIBLE"
        ):
            getattr(hvd, collective)(tensor, *([0] if collective == "broadcast_" else []))
    assert float(hvd.allreduce(torch.ones(1))) == 1.0


def test_shapes_that_differ_are_horovods_error(hvd, rank):
    with pytest.raises(hvd.HorovodInternalError, match=r"[Mm]ismatched"):
        hvd.allreduce(torch.ones(2 + rank), name="shapes_that_differ")


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_script_without_init_is_told_that_the_trainer_has_called_it(hvd, rank, caplog, is_forgotten):
    hvdtrain.init("torch")
    if is_forgotten:
        world.use(None)
    model = torch.nn.Linear(4, 1)
    with caplog.at_level(logging.INFO, "hvdtrain"):
        hvdtrain.Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.MSELoss())
    assert ("The Trainer called hvdtrain.init()" in caplog.text) == (is_forgotten and rank == 0)
