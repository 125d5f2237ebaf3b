"""Times on a GPU are the GPU's, to which the host sends work ahead; the GPU is simulated here: none has run this."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hvdtrain.distributed import gpu_path
from hvdtrain.distributed.recorder import Clock, Recorder, Seconds
from hvdtrain.distributed.world import SoloWorld
from hvdtrain.telemetry.interval import Heartbeat
from hvdtrain.telemetry.step_times import StepTimes
from hvdtrain.torch import step_marks
from hvdtrain.torch.ops import gpu_clock
from hvdtrain.torch.ops.gpu_clock import GpuClock


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

            def record(self, stream):
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
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(synchronize=made.wait))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("waits for reductions on other streams too"))
    monkeypatch.setattr(gpu_clock, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


class TwoRanks(SoloWorld):
    size = 2

    def allreduce(self, array, op="sum", *, name="host"):
        return np.array(array)


def test_an_interval_holds_what_the_gpu_took_and_not_what_launching_did(gpu):
    recorder = Recorder(GpuClock())
    beats = Heartbeat(TwoRanks(), times=recorder)
    found = []
    for _ in range(40):
        recorder.ended("other")
        gpu.work(0.10)  # forward and backward
        with recorder.waiting():
            gpu.work(0.05)  # the stream stands still for the others
        gpu.work(0.02)  # update
        recorder.ended("compute")
        found.append(beats.beat(False))
    times = [beat.times for beat in found if beat is not None][-1]
    assert times.step[0] == pytest.approx(0.17, rel=0.02)
    assert times.reduction[0] == pytest.approx(0.05, rel=0.02)
    assert times.compute[0] == pytest.approx(0.12, rel=0.02)
    assert times.other[0] < 0.01


def test_data_that_is_loaded_while_the_gpu_computes_is_not_waited_for(gpu):
    recorder = Recorder(GpuClock())
    beats = Heartbeat(TwoRanks(), times=recorder)
    found = []
    for _ in range(40):
        gpu.now += 0.06
        recorder.ended("data")
        gpu.work(0.10)
        recorder.ended("compute")
        found.append(beats.beat(False))
    times = [beat.times for beat in found if beat is not None][-1]
    assert times.data[0] < 0.03
    assert times.own[0] == pytest.approx(times.step[0], rel=0.01)


def test_a_wait_within_another_one_is_counted_once(gpu):
    recorder = Recorder(GpuClock())
    with recorder.waiting(), recorder.waiting():
        gpu.work(0.05)
    recorder.ended("compute")
    assert recorder.read() == pytest.approx(Seconds(reduction=0.05), abs=0.002)


def test_what_the_host_waits_in_collectives_outside_of_steps_is_no_step(gpu):
    recorder = Recorder(GpuClock())
    with recorder.waiting():
        gpu.now += 0.5
    recorder.ended("other")
    assert recorder.read() == pytest.approx(Seconds(elsewhere=0.5))


def test_before_its_first_use_the_gpu_is_not_touched(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: pytest.fail("makes a context on the wrong device"))
    recorder = Recorder(GpuClock())
    gpu.now += 0.5
    recorder.ended("data")
    assert recorder.read() == pytest.approx(Seconds(data=0.5))


def train(gpu, monkeypatch, *, steps):
    """Return the times of steps that load for 10 ms, and compute for 30 + 60 ms, wait for 20 and update for 5."""
    monkeypatch.setattr(torch.autograd, "backward", lambda: gpu.work(0.060))
    times = StepTimes(Recorder(Clock(lambda: gpu.now)))
    detach = step_marks.attach(times)
    module = torch.nn.Identity()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    try:
        for _ in range(steps):
            gpu.now += 0.010
            module(torch.zeros(4, 1))
            gpu.work(0.030)
            torch.autograd.backward()
            with times.recorder.waiting():  # as the reducer does
                gpu.work(0.020)
            gpu.work(0.005)
            optimizer.step()
    finally:
        detach()
    return times


@pytest.mark.parametrize("ahead", [False, True])
def test_exposed_communication_is_no_part_of_backward(gpu, monkeypatch, ahead):
    if ahead:
        monkeypatch.setenv(gpu_path.GPU_ASYNC, "1")
    taken = train(gpu, monkeypatch, steps=12)
    times = taken.summary()
    assert taken.facts["samples_per_step"] == 4
    assert taken.steps_taken == (11 if ahead else 12)  # the next step would report the last one
    assert times.communication_s == pytest.approx(0.020, abs=0.003)
    assert times.backward_s == pytest.approx(0.060, abs=0.003)
    # By its own clock the GPU has something to do while the next batch is loaded.
    assert times.data_s == pytest.approx(0.0 if ahead else 0.010, abs=0.002)
    assert times.step_s.median == pytest.approx(0.115 if ahead else 0.129, abs=0.005)
    assert (gpu.waits == 0) == ahead
