from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.telemetry.step_times import Spread
from hvdtrain.tools.bench import run, sweep
from hvdtrain.tools.bench.run import with_floor
from hvdtrain.tools.bench.sweep import Point


def exactly(seconds: float) -> Spread:
    return Spread(seconds, seconds, seconds)


def point(num_bytes: int, seconds: float) -> Point:
    return Point(num_bytes, exactly(seconds), 5, exactly(6000.0))


@pytest.mark.parametrize(("ranks", "moved"), [(1, 0), (2, 1000), (4, 1500), (1000, 1998)])
def test_each_rank_moves_twice_the_bytes_that_it_does_not_keep(ranks: int, moved: float) -> None:
    assert sweep.moved_bytes(1000, ranks) == pytest.approx(moved)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("25Gb/s", 3.125e9),
        ("3GB/s", 3e9),
        ("2.5Gb/s", 312.5e6),
        ("8b/s", 1),
    ],
)
def test_link_speeds_are_read_in_bits_and_bytes(text: str, bytes_per_s: float) -> None:
    assert run.parse_link(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    "text", ["", "fast", "25", "25G", "-25Gb/s", "0Gb/s", "9" * 400 + "b/s", "25Xb/s", "nanGb/s", "25Gb/h"]
)
def test_a_link_that_is_no_speed_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--link"):
        run.parse_link(text)


def test_copy_bandwidth_is_bytes_over_time_without_the_first_copy() -> None:
    ticks = itertools.chain([0.0, 0.0, 100.0], itertools.count(200.0, 0.5))
    calls: list[int] = []
    found = sweep.copy_bandwidth(lambda: calls.append(1), num_bytes=100_000, clock=lambda: next(ticks))
    assert found == exactly(200_000.0)
    assert calls == [1]


@given(st.integers(4, 1 << 34))
def test_sizes_grow_fourfold_from_one_float_to_the_largest_asked_for(max_bytes: int) -> None:
    found = sweep.sizes(max_bytes)
    assert found[0] == 4
    assert found[-1] == max_bytes - max_bytes % 4
    assert all(a < b <= 4 * a for a, b in itertools.pairwise(found))
    assert all(size % 4 == 0 for size in found)


@pytest.mark.parametrize("max_bytes", [3, 0, -5])
def test_a_largest_size_below_one_float_is_refused(max_bytes: int) -> None:
    with pytest.raises(UsageError, match=rf"--max-bytes must be at least 4.* Received: {max_bytes}"):
        sweep.sizes(max_bytes)


def test_every_rank_repeats_as_often_as_the_slowest_would() -> None:
    clock = itertools.count(0.0, 0.01)
    times = sweep.measure(lambda: None, budget_s=1.0, agree=lambda once_s: 0.05, clock=lambda: next(clock))
    assert len(times) == 20
    assert times == pytest.approx([0.01] * 20)


@pytest.mark.parametrize(("once_s", "repeats"), [(10.0, 5), (1e-6, 200), (0.02, 50), (0.0, 200)])
def test_repeats_keep_to_the_budget_within_5_and_200(once_s: float, repeats: int) -> None:
    assert sweep.repeats_for(once_s, budget_s=1.0) == repeats


def test_the_slowest_rank_stands_for_all() -> None:
    assert sweep.slowest([[1.0, 1.0, 9.0], [2.0, 2.0, 2.0]]) == exactly(2.0)


def test_bus_bandwidth_over_the_floors_speed_is_the_share() -> None:
    found = with_floor(point(1000, 0.5), ranks=4, link=None, on_memory=True)
    assert found.bus_bytes_per_s(4) == pytest.approx(3000)
    assert found.floor_s == pytest.approx(0.25)
    assert found.floor_share == pytest.approx(0.5)


def test_a_link_sets_the_floor_and_without_either_there_is_none() -> None:
    assert with_floor(point(1000, 0.5), ranks=4, link=3000.0, on_memory=True).floor_s == pytest.approx(0.5)
    assert with_floor(point(1000, 0.5), ranks=4, link=None, on_memory=False).floor_share is None


def test_a_point_survives_its_way_to_the_launcher() -> None:
    assert Point.from_dict(dataclasses.asdict(point(1000, 0.5))) == point(1000, 0.5)


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-8))
def test_fit_finds_the_line_that_the_points_are_on(alpha: float, beta: float) -> None:
    points = [point(n, alpha + beta * n) for n in sweep.sizes(64 << 20)]
    found = sweep.fit(points)
    assert found is not None
    assert found.alpha_s == pytest.approx(alpha, rel=1e-6)
    assert found.beta_s_per_byte == pytest.approx(beta, rel=1e-6)
    assert found.worst < 1e-6


def test_fit_is_least_squares_of_relative_errors() -> None:
    random = np.random.default_rng(0)
    points = [point(n, (1e-4 + 1e-9 * n) * random.uniform(0.8, 1.25)) for n in sweep.sizes(16 << 20)]
    design = np.array([[1 / p.time_s.median, p.num_bytes / p.time_s.median] for p in points])
    expected = np.linalg.lstsq(design, np.ones(len(points)), rcond=None)[0]
    found = sweep.fit(points)
    assert found is not None
    assert [found.alpha_s, found.beta_s_per_byte] == pytest.approx(list(expected), rel=1e-6)


def test_fit_is_never_negative() -> None:
    falling = sweep.fit([point(4, 2e-3), point(1024, 1e-3)])
    assert falling is not None
    assert falling.beta_s_per_byte == 0
    assert 1e-3 < falling.alpha_s < 2e-3
    steep = sweep.fit([point(4, 1e-9), point(8, 9e-9), point(16, 9e-8)])
    assert steep is not None
    assert steep.alpha_s == 0
    assert steep.beta_s_per_byte > 0


def test_one_size_has_no_line() -> None:
    assert sweep.fit([point(4, 1.0)]) is None
