"""What torch's GPUs change in collectives and checkpoints; the GPU is faked here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

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
