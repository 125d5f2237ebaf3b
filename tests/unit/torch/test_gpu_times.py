"""Times on a GPU are the GPU's, to which the host sends work ahead; the GPU is simulated here: none has run this."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hvdtrain.distributed import tuning, wait_time
from hvdtrain.distributed.world import SoloWorld
from hvdtrain.telemetry import heartbeat, step_times
from hvdtrain.torch import step_marks
from hvdtrain.torch.gpu_clock import GpuClock
from hvdtrain.torch.reducer import Reducer


class Gpu:
    """A host's clock, and a stream that comes to what it was given behind it."""

    def __init__(self) -> None:
        self.now = self.free = 0.0
        self.waits = 0

    def work(self, seconds, *, launch=0.001):
        self.now += launch
        self.free = max(self.free, self.now) + seconds

    def wait(self):
        self.waits += 1
        self.now = max(self.now, self.free)

    def event(self, enable_timing=False):
        assert enable_timing
        gpu = self

        class Event:
            at = None

            def record(self):
                self.at = max(gpu.free, gpu.now)

            def synchronize(self):
                gpu.now = max(gpu.now, self.at)

            def elapsed_time(self, other):
                assert other.at <= gpu.now, "the GPU has not come this far"
                return 1000 * (other.at - self.at)

        return Event()


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=made.wait))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("waits for reductions on other streams too"))
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(perf_counter=lambda: made.now))
    monkeypatch.setattr(wait_time, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


class TwoRanks(SoloWorld):
    size = 2

    def allreduce(self, array, op="sum", *, name="host"):
        return np.array(array)


def test_an_interval_holds_what_the_gpu_took_and_not_what_launching_did(gpu, monkeypatch):
    monkeypatch.setattr(wait_time, "device", GpuClock())
    beats = heartbeat.Pulse(TwoRanks())
    found = []
    for _ in range(40):
        with beats.training():
            gpu.work(0.10)  # forward and backward
            with wait_time.counted():
                gpu.work(0.05)  # the stream stands still for the others
            gpu.work(0.02)  # update
        found.append(beats.beat(asked=False))
    times = [beat.times for beat in found if beat is not None][-1]
    assert times.step[0] == pytest.approx(0.17, rel=0.02)
    assert times.reduction[0] == pytest.approx(0.05, rel=0.02)
    assert times.compute[0] == pytest.approx(0.12, rel=0.02)
    assert times.other[0] < 0.01


def test_data_that_is_loaded_while_the_gpu_computes_is_not_waited_for(gpu, monkeypatch):
    monkeypatch.setattr(wait_time, "device", GpuClock())
    beats = heartbeat.Pulse(TwoRanks())

    def batches():
        for _ in range(40):
            gpu.now += 0.06
            yield "batch"

    found = []
    for _ in beats.data(batches()):
        with beats.training():
            gpu.work(0.10)
        found.append(beats.beat(asked=False))
    times = [beat.times for beat in found if beat is not None][-1]
    assert times.data[0] < 0.03
    assert times.own[0] == pytest.approx(times.step[0], rel=0.01)


def test_a_wait_within_another_one_is_counted_once(gpu, monkeypatch):
    clock = GpuClock()
    monkeypatch.setattr(wait_time, "device", clock)
    with clock.training(), wait_time.counted(), wait_time.counted():
        assert not clock.takes_waits
        gpu.work(0.05)
    assert clock.read() == pytest.approx((0.05, 0.05), abs=0.002)
    assert not clock.takes_waits


def test_collectives_outside_of_steps_are_waited_for_by_the_host(gpu, monkeypatch):
    monkeypatch.setattr(wait_time, "device", GpuClock())
    before = wait_time.outside_graphs()
    with wait_time.counted():
        gpu.now += 0.5
    assert wait_time.outside_graphs() - before == pytest.approx(0.5)


def train(gpu, monkeypatch, *, steps):
    """Return the recorder of steps that load for 10 ms, and compute for 30 + 60 ms, wait for 20 and update for 5."""
    monkeypatch.setattr(Reducer, "synchronize", lambda self: gpu.work(0.020))
    monkeypatch.setattr(torch.autograd, "backward", lambda: gpu.work(0.060))
    recorder = step_times.Recorder(clock=lambda: gpu.now)
    detach = step_marks.attach(recorder)
    module = torch.nn.Identity()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    try:
        for _ in range(steps):
            gpu.now += 0.010
            module(torch.zeros(4, 1))
            gpu.work(0.030)
            torch.autograd.backward()
            Reducer.synchronize(None)
            gpu.work(0.005)
            optimizer.step()
    finally:
        detach()
    return recorder


@pytest.mark.parametrize("ahead", [False, True])
def test_exposed_communication_is_no_part_of_backward(gpu, monkeypatch, ahead):
    if ahead:
        monkeypatch.setenv(tuning.GPU_ASYNC, "1")
    recorder = train(gpu, monkeypatch, steps=12)
    times = recorder.summary()
    assert recorder.facts["samples_per_step"] == 4
    assert recorder.steps_taken == (11 if ahead else 12)  # the last one is told by the next
    assert times.communication_s == pytest.approx(0.020, abs=0.003)
    assert times.backward_s == pytest.approx(0.060, abs=0.003)
    # By its own clock the GPU has something to do while the next batch is loaded.
    assert times.data_s == pytest.approx(0.0 if ahead else 0.010, abs=0.002)
    assert times.step_s.median == pytest.approx(0.115 if ahead else 0.129, abs=0.005)
    assert (gpu.waits == 0) == ahead
