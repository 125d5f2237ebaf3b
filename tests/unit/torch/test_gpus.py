"""What torch's GPUs change in collectives and checkpoints; the GPU is faked here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hvdtrain.torch import collectives
from hvdtrain.torch.ops import engine, reduce_ops, submit
from hvdtrain.torch.steps import training_state


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A process that computes on the second GPU, whose generator's state is one number."""
    state = [torch.tensor([7], dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state[0])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda new: state.__setitem__(0, new))
    return state


def joins(monkeypatch, *, cuda):
    """Make Horovod note the device with which a rank joins; return the notes."""
    noted = []
    horovod = SimpleNamespace(join=lambda device: noted.append(device) or 0, cuda_built=lambda: cuda)
    monkeypatch.setattr(engine, "native", lambda: horovod)
    return noted


@pytest.mark.parametrize(("given", "cuda", "expected"), [((), True, 1), ((), False, -1), ((0,), True, 0)])
def test_a_rank_joins_with_its_gpu_where_horovod_uses_it(monkeypatch, on_a_gpu, given, cuda, expected):
    noted = joins(monkeypatch, cuda=cuda)
    assert reduce_ops.join(*given) == 0
    assert noted == [expected]


def test_a_rank_without_a_gpu_joins_on_the_cpu(monkeypatch):
    noted = joins(monkeypatch, cuda=True)
    reduce_ops.join()
    assert noted == [-1]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_adasum_without_mpi_is_refused_on_gpus_too(monkeypatch, device):
    horovod = SimpleNamespace(size=lambda: 2, rank=lambda: 1, mpi_enabled=lambda: False)
    monkeypatch.setattr(engine, "native", lambda: horovod)
    tensor = SimpleNamespace(device=device, is_cuda=device != "cpu")
    with pytest.raises(ValueError, match=rf"Adasum needs MPI.*{device}.*rank 1.*--mpi"):
        submit.check_adasum(tensor)


def test_the_gpus_generator_is_part_of_what_a_rank_holds(on_a_gpu):
    held = training_state.random_states()
    on_a_gpu[0] = torch.tensor([8], dtype=torch.uint8)
    training_state.set_random_states(held)
    assert on_a_gpu[0].tolist() == [7]


def test_a_state_from_a_gpu_is_taken_on_without_one():
    held = training_state.random_states() | {"random.cuda": torch.tensor([7], dtype=torch.uint8).numpy()}
    before = torch.rand(1)
    training_state.set_random_states(held)
    assert torch.rand(1) == before


def on_a_driver(monkeypatch, *, sees_gpu, cuda="13.0", loaded=(2, 28, 3)):
    """Let torch be built for this CUDA version, and see a GPU or none."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: loaded)


def built(*, nccl, cuda=True):
    return SimpleNamespace(cuda_built=lambda: cuda, nccl_built=lambda: nccl)


ONE = "GPU 0: NVIDIA H100 (UUID: GPU-a)\n"


def test_a_driver_too_old_for_torch_is_an_error_of_its_rank_not_a_training_on_the_cpu(nvidia_smi, monkeypatch):
    on_a_driver(monkeypatch, sees_gpu=False)
    nvidia_smi(ONE, "575.57.08\n")
    why = collectives.why_not(built(nccl=22803))
    assert why.startswith("the NVIDIA driver is 575.57.08, and CUDA 13.0 needs 580 or newer: apt-get install")
    assert why.endswith('Or train on CPUs: CUDA_VISIBLE_DEVICES=""')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert collectives.why_not(built(nccl=22803)) == ""


def test_a_lost_gpu_is_an_error_of_its_rank(nvidia_smi, monkeypatch):
    on_a_driver(monkeypatch, sees_gpu=False)
    nvidia_smi("Unable to determine the device handle for GPU 0000:C1:00.0: Unknown Error\n")
    assert "0000:C1:00.0: Unknown Error): `dmesg | grep Xid` has the cause" in collectives.why_not(built(nccl=22803))


@pytest.mark.parametrize(
    ("nccl", "loaded", "said"),
    [
        (22803, (2, 32, 1), ""),
        (2804, (2, 32, 1), ""),
        (0, (3, 1, 0), ""),  # without NCCL, through host memory
        (22803, (3, 1, 0), "the installed Horovod was built for NCCL 2, and torch"),
        (30100, (2, 28, 3), "the installed Horovod was built for NCCL 3, and torch"),
    ],
)
def test_another_major_version_of_nccl_than_built_is_an_error(monkeypatch, nccl, loaded, said):
    on_a_driver(monkeypatch, sees_gpu=True, loaded=loaded)
    why = collectives.why_not(built(nccl=nccl))
    assert why.startswith(said)
    assert bool(why) == bool(said) == ("hvdtrain build" in why)


def test_a_horovod_without_gpu_operations_is_an_error_where_torch_sees_a_gpu(monkeypatch):
    on_a_driver(monkeypatch, sees_gpu=True)
    assert "no GPU operations. Run `hvdtrain build`" in collectives.why_not(built(nccl=0, cuda=False))


def test_a_cpu_build_of_torch_asks_no_driver(monkeypatch, nvidia_smi):
    on_a_driver(monkeypatch, sees_gpu=False, cuda=None)
    nvidia_smi(ONE, "100.1\n")
    assert collectives.why_not(built(nccl=0, cuda=False)) == ""
