"""How often ranks tell each other how it goes, and that they find out in the same step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hvdtrain.distributed import wait_time
from hvdtrain.distributed.world import SoloWorld
from hvdtrain.telemetry import heartbeat


class TwoRanks(SoloWorld):
    """Rank 0 of two; the other says what it was told to: asked, then seconds in the order of `RankTimes`."""

    size = 2

    def __init__(self):
        super().__init__()
        self.asked = 0.0
        self.other = [0.0] * 5
        self.exchanges = 0

    def allreduce(self, array, op="sum", *, name="host"):
        assert op == "max"
        self.exchanges += 1
        return np.maximum(array, [self.asked, *[0.0] * 5, *self.other])


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(heartbeat.time, "perf_counter", lambda: now[0])
    return now


def take(beats, clock, seconds, *, asked=False):
    with beats.training():
        clock[0] += seconds
    return beats.beat(asked)


def test_exchanges_are_about_a_second_apart(clock):
    world = TwoRanks()
    beats = heartbeat.Pulse(world)
    for _ in range(1000):
        take(beats, clock, 0.01)
    assert 9 <= world.exchanges <= 12


def test_the_slowest_rank_decides_how_often(clock):
    world = TwoRanks()
    world.other[0] = 0.5  # seconds a step
    beats = heartbeat.Pulse(world)
    for _ in range(100):
        take(beats, clock, 0.01)
    assert 49 <= world.exchanges <= 51


def test_one_rank_that_was_asked_stops_all(clock):
    world = TwoRanks()
    beats = heartbeat.Pulse(world)
    assert take(beats, clock, 1.0, asked=True).asked
    world.asked = 1.0
    assert take(beats, clock, 1.0).asked


def test_one_process_needs_no_exchange_and_stops_at_once(clock):
    beats = heartbeat.Pulse(SoloWorld())
    assert not take(beats, clock, 0.01).asked
    assert take(beats, clock, 0.01) is None
    assert take(beats, clock, 0.01, asked=True).asked


@pytest.fixture
def graphs(monkeypatch):
    """Seconds that graphs have waited, as the only graph tells."""
    seconds = [0.0]
    monkeypatch.setattr(wait_time, "_graphs", [lambda: seconds[0]])
    return seconds


def loaded(beats, batches):
    """Yield batches as the training loop takes them."""
    while True:
        beats.begin_loading()
        batch = next(batches, None)
        beats.end_loading()
        if batch is None:
            return
        yield batch


def test_every_rank_learns_where_each_ones_time_went(clock, graphs):
    """A step of rank 0: 0.2 s for data, 0.4 to train, 0.15 of them waits, 0.1 for callbacks, which also wait 0.3."""
    world = TwoRanks()
    beats = heartbeat.Pulse(world)
    take(beats, clock, 0.1)  # ten steps an exchange from here on
    world.other = [1.5, 0.5, 0.3, 0.25, 0.7]

    def slow():
        for _ in range(10):
            clock[0] += 0.2
            yield "batch"

    with wait_time.counted():
        clock[0] += 100.0
    beats.go_on()  # after a validation of 100 s
    found = None
    for _ in loaded(beats, slow()):
        assert found is None
        with beats.training():
            clock[0] += 0.3
            graphs[0] += 0.05
            with wait_time.counted():
                clock[0] += 0.1
        clock[0] += 0.1
        with wait_time.counted():
            clock[0] += 0.3
        found = beats.beat(False)
    assert (found.steps, found.seconds) == (10, pytest.approx(15.0))  # on the slowest
    times = found.times
    np.testing.assert_allclose(times.step, [1.0, 1.5])
    np.testing.assert_allclose(times.data, [0.2, 0.5])
    np.testing.assert_allclose(times.compute, [0.25, 0.05])
    np.testing.assert_allclose(times.reduction, [0.15, 0.25])
    np.testing.assert_allclose(times.other, [0.1, 0.7])
    np.testing.assert_allclose(times.own, [0.55, 1.25])


def test_waiting_for_the_others_data_is_not_a_ranks_own(clock):
    def in_step():
        for _ in range(3):
            clock[0] += 0.2
            with wait_time.counted():  # for the slowest rank's batch
                clock[0] += 0.7
            yield "batch"
        with wait_time.counted():  # for all to be done
            clock[0] += 5.0

    beats = heartbeat.Pulse(SoloWorld())
    for _ in loaded(beats, in_step()):
        times = take(beats, clock, 0.1).times
        assert (times.data[0], times.reduction[0], times.other[0]) == pytest.approx((0.2, 0.0, 0.0))
    assert take(beats, clock, 0.1).times.reduction[0] == pytest.approx(0.0)


def test_waits_add_up_and_a_cleared_graph_counts_no_more(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(wait_time.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(wait_time, "_graphs", [])
    before = wait_time.outside_graphs()
    with wait_time.counted():
        pass
    assert wait_time.outside_graphs() - before == 1.0
    assert wait_time.in_graphs() == 0.0
    wait_time.note_graph(lambda: 0.25)
    wait_time.note_graph(lambda: 1 / 0)
    assert wait_time.in_graphs() == 0.25
