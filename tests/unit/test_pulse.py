"""How often ranks ask each other whether to stop, and that they find out in the same step."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain import pulse
from hvdtrain.world import SoloWorld


class TwoRanks(SoloWorld):
    """Rank 0 of two; the other says what it was told to."""

    size = 2

    def __init__(self):
        super().__init__()
        self.others = np.zeros(2)
        self.exchanges = 0

    def allreduce(self, array, op="sum", *, name="host"):
        self.exchanges += 1
        return np.maximum(array, self.others)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(pulse.time, "perf_counter", lambda: now[0])
    return now


def test_exchanges_are_about_a_second_apart(clock):
    world = TwoRanks()
    beats = pulse.Pulse(world)
    for _ in range(1000):
        clock[0] += 0.01
        assert not beats.beat(False)
    assert 9 <= world.exchanges <= 12


def test_the_slowest_rank_decides_how_often(clock):
    world = TwoRanks()
    world.others = np.array([0.0, 0.5])  # the other takes half a second a step
    beats = pulse.Pulse(world)
    for _ in range(100):
        clock[0] += 0.01
        beats.beat(False)
    assert 49 <= world.exchanges <= 51


def test_one_rank_that_was_asked_stops_all(clock):
    world = TwoRanks()
    beats = pulse.Pulse(world)
    clock[0] += 1.0
    assert beats.beat(True)
    clock[0] += 1.0
    world.others = np.array([1.0, 0.0])
    assert beats.beat(False)


def test_one_process_needs_no_exchange():
    beats = pulse.Pulse(SoloWorld())
    assert not beats.beat(False)
    assert beats.beat(True)
