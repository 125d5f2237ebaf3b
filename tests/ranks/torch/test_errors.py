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


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("what", ["allreduce", "allgather", "reducescatter"])
def test_an_error_of_any_member_of_a_group_is_the_groups(hvd, rank, size, what, which):
    """Horovod told that of the last member alone, and returned memory that nobody had written for the others."""
    group = [torch.ones(size, 2) for _ in range(2)]
    send = getattr(hvd, f"grouped_{what}")
    right = send(group, name=f"group.{what}")
    wrong = list(group)
    if rank == size - 1:
        wrong[which] = torch.ones(size, 3)
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match=r"Mismatched \w+ tensor shapes"):
            send(wrong, name=f"group.{what}")
    assert all(map(torch.equal, send(group, name=f"group.{what}"), right))


@pytest.mark.parametrize("what", ["allreduce", "allgather", "reducescatter"])
def test_horovods_own_groups_refuse_what_is_not_contiguous(hvd, size, what):
    import horovod.torch

    group = [torch.ones(size, size), torch.arange(float(size * size)).reshape(size, size).t()]
    with pytest.raises(ValueError, match="contiguous"):
        getattr(horovod.torch, f"grouped_{what}")(group)
    ours = getattr(hvd, f"grouped_{what}")(group)
    assert torch.equal(ours[1], getattr(hvd, what)(group[1].contiguous()))


@pytest.mark.parametrize(("tensor", "splits", "message"), [
    (lambda size: torch.tensor(1.0), None, "scalar"),
    (lambda size: torch.ones(4), lambda size: [-1, 2] + [0] * (size - 2), "negative split"),
    (lambda size: torch.ones(4), lambda size: [2**30] * 2 + [0] * (size - 2), "greater than the first dimension"),
])  # fmt: skip
def test_an_alltoall_that_cannot_be_divided_is_refused(hvd, size, tensor, splits, message):
    divided = torch.tensor(splits(size), dtype=torch.int32) if splits else None
    with pytest.raises(ValueError, match=message):
        hvd.alltoall(tensor(size), splits=divided)
    assert float(hvd.allreduce(torch.ones(1))) == 1.0


@pytest.mark.parametrize("op", ["Min", "Max", "Product"])
def test_a_reduction_that_is_no_sum_has_no_gradient(hvd, rank, op):
    """Horovod took the minimum, for example, of the gradients for the gradient of the minimum."""
    x = torch.tensor([1.0 + rank, 2.0], requires_grad=True)
    reduced = hvd.allreduce(x, op=getattr(hvd, op), name="no.gradient")
    with pytest.raises(NotImplementedError, match=rf"no\.gradient with op={op}\. .*hvd.allgather"):
        reduced.sum().backward()


@pytest.mark.parametrize("what", ["allreduce", "allgather", "alltoall", "reducescatter", "barrier"])
def test_a_process_set_that_was_removed_is_refused(hvd, what):
    removed = hvd.add_process_set([0])
    hvd.remove_process_set(removed)
    arguments = [] if what == "barrier" else [torch.ones(6)]
    with pytest.raises(ValueError, match=r"not registered: call hvd.add_process_set on all ranks"):
        getattr(hvd, what)(*arguments, process_set=removed)
