"""The rank that is named as slow, the moment, and the reason."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.callbacks import Stragglers
from hvdtrain.telemetry.interval import Interval, RankTimes

TRAINER = SimpleNamespace(world=SimpleNamespace(size=4, is_root=True), hosts=["a", "a", "b", "b"])


def interval(data, compute, other=(0.0,) * 4):
    """Four ranks in step: whoever is ready first waits for the last one."""
    data, compute, other = np.array(data), np.array(compute), np.array(other)
    step = np.full(4, (data + compute + other).max())
    train = step - data - other
    times = RankTimes(step=step, data=data, train=train, reduction=train - compute, other=other)
    return Interval(0, 1, 1, 1, 1, 1.0, times, 0.1, {})


EVEN = interval([0.01] * 4, [0.1] * 4)
SLOW_DATA = interval([0.01, 0.01, 0.01, 0.2], [0.1] * 4)
SLOW_COMPUTE = interval([0.01] * 4, [0.1, 0.25, 0.1, 0.1])
SLOW_CALLBACK = interval([0.01] * 4, [0.1] * 4, [0.09, 0.001, 0.001, 0.001])


def run(caplog, *intervals, factor=1.3):
    stragglers = Stragglers(factor)
    stragglers.on_fit_begin(TRAINER)
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        for each in (EVEN, *intervals):
            stragglers.on_interval(TRAINER, each)
    return stragglers, [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("slow", "rank", "host", "what"),
    [
        (SLOW_DATA, 3, "b", "waiting for data takes it 200.0 ms, the median 10.0 ms"),
        (SLOW_COMPUTE, 1, "a", "computing takes it 250.0 ms, the median 100.0 ms"),
        (
            SLOW_CALLBACK,
            0,
            "a",
            "what it does between steps takes it 90.0 ms, the median 1.0 ms. Look",
        ),
    ],
)
def test_a_slow_rank_is_named_once_with_its_host_and_the_reason(caplog, slow, rank, host, what):
    stragglers, (said,) = run(caplog, *[slow] * 40)
    assert said.startswith(f"rank {rank} on host {host} is slow")
    assert what in said
    assert list(stragglers.slow) == [rank]


def test_a_rank_is_named_after_18_seconds_and_three_intervals(caplog):
    assert run(caplog, *[SLOW_DATA] * 17)[1] == []
    assert len(run(caplog, *[SLOW_DATA] * 18)[1]) == 1
    caplog.clear()
    long = dataclasses.replace(SLOW_DATA, seconds=60.0)
    assert run(caplog, long, long)[1] == []
    assert len(run(caplog, long, long, long)[1]) == 1


def test_a_rank_that_recovers_is_told_of_and_is_slow_again_after_twice_the_time(caplog):
    once = [*[SLOW_DATA] * 18, *[EVEN] * 18]
    stragglers, said = run(caplog, *once)
    assert ["slow" in line for line in said] == [True, False]
    assert "rank 3 on host b is as fast as the others again" in said[1]
    assert not stragglers.slow
    caplog.clear()
    assert len(run(caplog, *once, *[SLOW_DATA] * 35)[1]) == 2
    caplog.clear()
    stragglers, said = run(caplog, *once, *[SLOW_DATA] * 36)
    assert len(said) == 3
    assert list(stragglers.slow) == [3]


def test_a_slow_rank_that_is_fast_now_and_then_stays_named(caplog):
    _, said = run(caplog, *[SLOW_DATA, SLOW_DATA, SLOW_DATA, EVEN] * 60)
    assert len(said) == 1


# Which of two ranks was late in each second of three minutes on a host with 8 other programs on 2 cores.
RECORDED = (
    ".....0...1....00.....0....0...1................................1....000...1..00......0011.000000..0......10......"
    "111..11.1000..............................................1....1.11"
)


def test_ranks_that_take_turns_on_a_busy_host_are_not_named(caplog):
    late = {"0": interval([0.01] * 4, [0.2, 0.1, 0.1, 0.1]), "1": interval([0.01] * 4, [0.1, 0.2, 0.1, 0.1]), ".": EVEN}
    _, said = run(caplog, *[late[who] for who in RECORDED])
    assert said == []


def test_little_is_not_worth_a_word(caplog):
    shared = interval([0.0001, 0.0001, 0.0001, 0.0010], [0.0001] * 4)
    waits = RankTimes(np.full(4, 0.1), shared.times.data, np.full(4, 0.09), np.full(4, 0.0899), np.zeros(4))
    lost = Interval(0, 1, 1, 1, 1, 1.0, waits, 0.1, {})
    _, said = run(caplog, *[lost] * 40)
    assert said == []


def test_the_first_step_and_a_factor_of_0_say_nothing(caplog):
    stragglers = Stragglers()
    stragglers.on_fit_begin(TRAINER)
    for each in [SLOW_DATA] * 18:  # the first of which compiles
        stragglers.on_interval(TRAINER, each)
    assert not stragglers.slow
    assert run(caplog, *[SLOW_DATA] * 40, factor=0)[1] == []


@pytest.mark.parametrize("factor", [1, 0.5, -2, float("nan")])
def test_a_factor_that_every_rank_would_exceed_is_refused(factor):
    with pytest.raises(ValueError, match=r"factor must be above 1, or 0 for no warnings\. Received"):
        Stragglers(factor)
