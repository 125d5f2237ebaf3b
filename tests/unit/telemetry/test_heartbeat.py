"""Heartbeats: their frequency, and that all ranks receive a report in the same step."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.distributed.recorder import Clock, Recorder
from hvdtrain.distributed.world import SoloWorld
from hvdtrain.telemetry import interval
from hvdtrain.telemetry.interval import Heartbeat


class TwoRanks(SoloWorld):
    """Rank 0 of two; the other reports what it is given: a stop, a wait, seconds in the order of `RankTimes`."""

    size = 2

    def __init__(self):
        super().__init__()
        self.stop = self.spent_s = self.wait_s = 0.0
        self.other = [0.0] * 5
        self.exchanges = 0

    def allreduce(self, array, op="sum", *, name="host"):
        assert op == "max"
        self.exchanges += 1
        return np.maximum(array, [self.stop, self.spent_s, -self.wait_s, *[0.0] * 5, *self.other])


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def times(clock):
    return Recorder(Clock(lambda: clock[0]))


def take(beats, times, clock, seconds, *, stop=False, **limit):
    clock[0] += seconds
    times.ended("compute")
    return beats.beat(stop, **limit)


def test_exchanges_are_about_a_second_apart(clock, times):
    world = TwoRanks()
    beats = Heartbeat(world, times=times)
    for _ in range(1000):
        take(beats, times, clock, 0.01)
    assert 9 <= world.exchanges <= 12


def test_the_slowest_rank_decides_how_often(clock, times):
    world = TwoRanks()
    world.other[0] = 0.5  # seconds a step
    beats = Heartbeat(world, times=times)
    for _ in range(100):
        take(beats, times, clock, 0.01)
    assert 49 <= world.exchanges <= 51


@pytest.mark.parametrize(("waits", "others", "exchanges"), [(0.2, 0.2, 25), (2.0, 2.0, 10), (0.2, 0.0, 100)])
def test_exchanges_that_all_ranks_wait_in_come_less_often(clock, times, monkeypatch, waits, others, exchanges):
    world = TwoRanks()
    world.wait_s = others
    reduce = world.allreduce

    def slow(*args, **kwargs):
        clock[0] += waits
        return reduce(*args, **kwargs)

    monkeypatch.setattr(world, "allreduce", slow)
    monkeypatch.setattr(interval.time, "perf_counter", lambda: clock[0])
    beats = Heartbeat(world, times=times)
    for _ in range(1000):
        take(beats, times, clock, 0.1)
    assert world.exchanges == pytest.approx(exchanges, rel=0.1)


def test_it_says_before_a_step_whether_the_steps_end_exchanges(clock, times):
    world = TwoRanks()
    beats = Heartbeat(world, times=times)
    for _ in range(20):
        due, before = beats.is_due, world.exchanges
        take(beats, times, clock, 0.3)
        assert world.exchanges == before + due
    assert not Heartbeat(SoloWorld(), times=times).is_due


def test_one_rank_that_is_requested_to_stop_stops_all(clock, times):
    world = TwoRanks()
    beats = Heartbeat(world, times=times)
    assert take(beats, times, clock, 1.0, stop=True).stop
    world.stop = 1.0
    assert take(beats, times, clock, 1.0).stop


def test_one_process_needs_no_exchange_and_stops_at_once(clock, times):
    beats = Heartbeat(SoloWorld(), times=times)
    assert not take(beats, times, clock, 0.01).stop
    assert take(beats, times, clock, 0.01) is None
    assert take(beats, times, clock, 0.01, stop=True).stop


def loaded(times, batches):
    """Yield batches as the training loop takes them."""
    while True:
        batch = next(batches, None)
        times.ended("data" if batch else "outside")
        if batch is None:
            return
        yield batch
        times.ended("other")


def test_every_rank_learns_where_each_ones_time_went(clock, times):
    """A step of rank 0: 0.2 s for data, 0.4 to train, 0.15 of them waits, 0.1 for callbacks, which also wait 0.3."""
    world = TwoRanks()
    graph = [0.0]
    times.note_graph(lambda: graph[0])
    beats = Heartbeat(world, times=times)
    take(beats, times, clock, 0.1)  # ten steps an exchange from here on
    world.other = [1.5, 0.5, 0.3, 0.25, 0.7]

    def slow():
        for _ in range(10):
            clock[0] += 0.2
            yield "batch"

    with times.waiting():
        clock[0] += 100.0
    times.ended("outside")  # after a validation of 100 s
    found = None
    for _ in loaded(times, slow()):
        assert found is None
        clock[0] += 0.3
        graph[0] += 0.05
        with times.waiting():
            clock[0] += 0.1
        times.ended("compute")
        clock[0] += 0.1
        with times.waiting():
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


def test_waiting_for_the_others_data_is_not_a_ranks_own(clock, times):
    def in_step():
        for _ in range(3):
            clock[0] += 0.2
            with times.waiting():  # for the slowest rank's batch
                clock[0] += 0.7
            yield "batch"
        with times.waiting():  # for all to be done
            clock[0] += 5.0

    beats = Heartbeat(SoloWorld(), times=times)
    for _ in loaded(times, in_step()):
        found = take(beats, times, clock, 0.1).times
        assert (found.data[0], found.reduction[0], found.other[0]) == pytest.approx((0.2, 0.0, 0.0))
    assert take(beats, times, clock, 0.1).times.step[0] == pytest.approx(0.1)


def test_an_exchange_comes_soon_after_a_limit(clock, times):
    world = TwoRanks()
    beats = Heartbeat(world, times=times)
    world.spent_s = 0.75  # of the other rank
    found = take(beats, times, clock, 0.01, spent_s=0.5, limit_s=1.0)
    assert found.spent_s == 0.75
    reports = [take(beats, times, clock, 0.01, spent_s=0.5, limit_s=1.0) is not None for _ in range(25)]
    assert reports == [*[False] * 24, True]
