"""The facts about the GPU that a rank computes on: its name, its generator, its clock."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import hvdtrain.torch as hvd
from hvdtrain.distributed import devices, gpu_path
from hvdtrain.distributed.recorder import Recorder
from hvdtrain.telemetry.step_times import StepTimes
from hvdtrain.torch import collectives, step_marks
from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.gpu_clock import GpuClock
from hvdtrain.torch.steps import training_state

pytestmark = pytest.mark.cuda_only


def test_torch_and_the_driver_name_the_same_gpu(device):
    uuid, name = collectives.gpu(torch.cuda.current_device())
    assert (uuid, bool(name)) == (devices.from_driver(torch.cuda.current_device())[0], True)


def test_the_installed_horovod_serves_this_gpu(device):
    hvd.init()
    assert collectives.why_not(engine.native()) == ""
    assert hvd.join() == 0
    assert hvd.allreduce(torch.ones(3, device=device)).tolist() == [1.0, 1.0, 1.0]


def test_the_gpus_generator_goes_on_where_it_was(device):
    torch.rand(1, device=device)
    held = training_state.random_states()
    drawn = torch.rand(8, device=device)
    training_state.set_random_states(held)
    assert torch.equal(torch.rand(8, device=device), drawn)


def test_the_gpus_clock_counts_waits_as_a_part_of_training(device):
    recorder = Recorder(GpuClock(device))
    matrix = torch.randn(2048, 2048, device=device)
    recorder.ended("outside")
    for _ in range(3):
        matrix @ matrix
        with recorder.waiting():
            matrix @ matrix
        matrix @ matrix
        recorder.ended("compute")
    seconds = recorder.read()
    assert 0 < seconds.reduction < seconds.compute + seconds.backward + seconds.reduction
    assert recorder.read() == seconds


@pytest.mark.parametrize("ahead", ["0", "1"])
def test_steps_are_timed_with_and_without_waiting_for_their_end(device, monkeypatch, ahead):
    monkeypatch.setattr(gpu_path, "_is_async", ahead == "1")  # of this process, which has decided in `init`
    net = torch.nn.Linear(512, 512, device=device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    taken = StepTimes(Recorder())
    detach = step_marks.attach(taken)
    try:
        for _ in range(12):
            optimizer.zero_grad()
            net(torch.ones(64, 512, device=device)).sum().backward()
            optimizer.step()
    finally:
        detach()
    times = taken.summary()
    assert taken.steps_taken == 12 - int(ahead)
    assert 0 < times.backward_s < times.step_s.median


@pytest.mark.needs("jax", "jax_cuda13_plugin", "keras")
def test_jax_is_bound_to_one_gpu_of_a_host():
    code = (
        "from hvdtrain.keras import jax_device\n"
        "assert jax_device.pick_device(0) == 'cuda:0'\n"
        "import jax\n"
        "assert [device.platform for device in jax.local_devices()] == ['gpu']\n"
    )
    environment = os.environ | {"HOROVOD_SIZE": "2", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # one of two ranks
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
