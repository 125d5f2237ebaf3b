from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.tools.plan.model import (
    Algorithm,
    Cluster,
    Step,
    allreduce,
    expected_maximum,
    forecast,
    marginal_efficiency,
    pays_up_to,
)


def allreduce_s(cluster: Cluster, size_bytes: float, ranks: int) -> float:
    return sum(allreduce(cluster, size_bytes, ranks))


RANKS = [2**power for power in range(13)]
STEP = Step(compute_s=0.4, gradient_bytes=400e6, samples=64)
CLUSTER = Cluster(link_bytes_per_s=3e9, ranks_per_host=4, intra_bytes_per_s=1e10)

steps = st.builds(
    Step,
    compute_s=st.floats(1e-6, 1e3),
    gradient_bytes=st.floats(1, 1e11),
    samples=st.integers(1, 4096),
    backward_share=st.floats(1e-3, 1),
    spread_s=st.floats(0, 10),
)
clusters = st.builds(
    Cluster,
    link_bytes_per_s=st.floats(1e3, 1e12),
    ranks_per_host=st.integers(1, 16),
    intra_bytes_per_s=st.floats(1e3, 1e12),
    link_efficiency=st.floats(0.1, 1),
    latency_s=st.floats(0, 1e-2),
    intra_latency_s=st.floats(0, 1e-2),
    overhead_s=st.floats(0, 1e-2),
    bucket_bytes=st.floats(1e8, 1e11),
    overlap=st.floats(0, 1),
    algorithm=st.sampled_from(Algorithm),
)


def at_most(left: float, right: float) -> bool:
    """Compare but for the rounding of sums."""
    return left <= right * (1 + 1e-9) + 1e-12


@given(steps, clusters)
def test_one_rank_is_exactly_the_measured_step(step: Step, cluster: Cluster) -> None:
    alone = forecast(step, cluster, 1)
    assert alone.step_s == step.compute_s
    assert alone.efficiency == 1
    assert alone.sync_s == alone.exposed_s == alone.waiting_s == 0


@given(steps, clusters, st.integers(1, 5000))
def test_times_are_never_negative_and_efficiency_is_a_share(step: Step, cluster: Cluster, ranks: int) -> None:
    f = forecast(step, cluster, ranks)
    assert min(f.sync_s, f.exposed_s, f.waiting_s, f.bandwidth_s) >= 0
    assert at_most(f.exposed_s, f.sync_s)
    assert f.step_s >= step.compute_s
    assert 0 < f.efficiency <= 1


@given(steps, clusters, st.integers(2, 5000), st.floats(1, 1e3))
def test_a_faster_link_never_makes_a_step_slower(step: Step, cluster: Cluster, ranks: int, factor: float) -> None:
    assert cluster.link_bytes_per_s is not None
    faster = replace(cluster, link_bytes_per_s=cluster.link_bytes_per_s * factor)
    assert at_most(forecast(step, faster, ranks).step_s, forecast(step, cluster, ranks).step_s)


@given(steps, clusters, st.integers(1, 5000), st.integers(1, 5000))
def test_a_step_never_gets_shorter_with_more_ranks(step: Step, cluster: Cluster, a: int, b: int) -> None:
    fewer, more = forecast(step, cluster, min(a, b)), forecast(step, cluster, max(a, b))
    assert at_most(fewer.step_s, more.step_s)


@given(steps, clusters, st.integers(1, 10**9))
def test_the_cost_of_a_run_never_falls_as_ranks_double(step: Step, cluster: Cluster, samples: int) -> None:
    costs = [forecast(step, cluster, ranks).rank_hours(samples) for ranks in RANKS]
    assert all(at_most(fewer, more) for fewer, more in pairwise(costs))


@given(steps, clusters, st.integers(2, 5000), st.floats(0, 1))
def test_less_overlap_never_makes_a_step_shorter(step: Step, cluster: Cluster, ranks: int, overlap: float) -> None:
    full = forecast(step, replace(cluster, overlap=1.0), ranks)
    part = forecast(step, replace(cluster, overlap=overlap), ranks)
    none = forecast(step, replace(cluster, overlap=0.0), ranks)
    assert at_most(full.exposed_s, part.exposed_s)
    assert at_most(part.exposed_s, none.exposed_s)
    assert none.exposed_s == pytest.approx(none.sync_s)


def test_a_ring_sends_no_more_than_the_bandwidth_bound() -> None:
    flat = Cluster(link_bytes_per_s=1e9, link_efficiency=1, latency_s=1e-5, overhead_s=0, algorithm=Algorithm.ring)
    assert allreduce_s(flat, 1e9, 8) == pytest.approx(2 * 7 / 8 + 14 * 1e-5)


def test_ranks_of_a_host_share_its_link_and_only_hosts_pay_its_latency() -> None:
    ring = replace(CLUSTER, link_efficiency=1.0, overhead_s=0.0, algorithm=Algorithm.ring)
    latency = 2 * (8 - 2) * ring.intra_latency_s + 2 * (2 - 1) * ring.latency_s
    assert allreduce_s(ring, 3e9, 8) == pytest.approx(2 * 7 / 8 + latency)
    within = 2 * 3 / 4 * 3e9 / 1e10 + 2 * 3 * ring.intra_latency_s
    assert allreduce_s(ring, 3e9, 4) == pytest.approx(within)


def test_small_messages_take_the_tree_and_large_ones_the_ring() -> None:
    flat = Cluster(link_bytes_per_s=3e9)
    ring, tree = (replace(flat, algorithm=way) for way in (Algorithm.ring, Algorithm.tree))
    assert allreduce_s(flat, 1e3, 1024) == allreduce_s(tree, 1e3, 1024) < allreduce_s(ring, 1e3, 1024)
    # On two ranks a ring sends half of what a tree sends.
    assert allreduce_s(flat, 1e9, 2) == allreduce_s(ring, 1e9, 2) < allreduce_s(tree, 1e9, 2)


def test_the_last_bucket_is_exposed_and_those_before_it_are_hidden_under_a_long_backward() -> None:
    slow = replace(STEP, compute_s=60.0)
    f = forecast(slow, CLUSTER, 512)
    buckets = 6  # 400 MB in parts of at most 64 MiB
    assert f.exposed_s == pytest.approx(f.sync_s / buckets)


def test_a_slow_link_exposes_all_but_what_fits_under_backward() -> None:
    slow = replace(CLUSTER, link_bytes_per_s=1e8)
    f = forecast(STEP, slow, 512)
    backward_s = STEP.compute_s * STEP.backward_share
    # Reducing begins when the first of 6 buckets is ready, and never pauses.
    assert f.exposed_s == pytest.approx(f.sync_s - backward_s * 5 / 6)


@given(st.integers(1, 50), st.floats(1e-6, 1e2), st.floats(1e-6, 1e2))
def test_what_is_exposed_is_that_of_buckets_reduced_one_by_one(buckets: int, backward_s: float, sync_s: float) -> None:
    cluster = Cluster(link_bytes_per_s=1 / sync_s, link_efficiency=1, latency_s=0, overhead_s=0, bucket_bytes=1.0)
    step = Step(compute_s=backward_s, gradient_bytes=buckets, samples=1, backward_share=1.0)
    done_s = 0.0  # seconds after backward began
    for bucket in range(1, buckets + 1):
        done_s = max(backward_s * bucket / buckets, done_s) + sync_s
    assert forecast(step, cluster, 2).exposed_s == pytest.approx(done_s - backward_s, abs=1e-9 * done_s)


def test_a_billion_tiny_buckets_are_forecast_at_once() -> None:
    f = forecast(STEP, replace(CLUSTER, bucket_bytes=0.1), 512)
    assert f.sync_s > 4e9 * CLUSTER.overhead_s


@pytest.mark.parametrize(("ranks", "expected"), [(1, 0.0), (2, 0.5642), (10, 1.5388), (100, 2.5076), (1000, 3.2414)])
def test_the_slowest_of_many_ranks_is_known_from_order_statistics(ranks: int, expected: float) -> None:
    assert expected_maximum(ranks) == pytest.approx(expected, abs=0.03)  # exact values: Harter 1961, table 1


def test_a_measured_spread_lengthens_steps_as_ranks_grow() -> None:
    waits = [forecast(replace(STEP, spread_s=0.01), CLUSTER, ranks).waiting_s for ranks in RANKS]
    assert waits[0] == 0
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(0.01 * 3.6, rel=0.05)


def test_adding_ranks_stops_paying_where_the_rule_says() -> None:
    forecasts = [forecast(STEP, replace(CLUSTER, algorithm=Algorithm.ring, latency_s=1e-3), ranks) for ranks in RANKS]
    stop = pays_up_to(forecasts, worth=0.5)
    assert 1 < stop.ranks < RANKS[-1]
    assert all(marginal_efficiency(stop, more) < 0.5 for more in forecasts if more.ranks > stop.ranks)


def test_the_step_onto_the_network_does_not_hide_that_many_hosts_pay() -> None:
    # From one host of 8 to two, the slower link eats most of what the added ranks bring; from two to many it does not.
    step = Step(compute_s=0.4, gradient_bytes=600e6, samples=64)
    cluster = Cluster(link_bytes_per_s=3e9, ranks_per_host=8, intra_bytes_per_s=1e11)
    forecasts = [forecast(step, cluster, ranks) for ranks in RANKS]
    one_host, two_hosts = forecasts[3], forecasts[4]
    assert marginal_efficiency(one_host, two_hosts) < 0.5
    assert pays_up_to(forecasts, worth=0.5).ranks == RANKS[-1]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("compute_s", 0.0, "the step's time"),
        ("compute_s", float("nan"), "the step's time"),
        ("gradient_bytes", -1.0, "the gradients' size"),
        ("samples", 0, "a rank's samples"),
        ("backward_share", 1.01, "backward's share"),
        ("backward_share", 0.0, "backward's share"),
        ("spread_s", -1e-3, "the step's spread"),
    ],
)
def test_a_step_that_cannot_be_is_refused(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*Received: {value}"):
        replace(STEP, **{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("link_bytes_per_s", -1.0, "the link's speed"),
        ("link_bytes_per_s", float("inf"), "the link's speed"),
        ("intra_bytes_per_s", 0.0, "the speed within a host"),
        ("ranks_per_host", 0, "ranks per host"),
        ("link_efficiency", 1.5, "the link's efficiency"),
        ("bucket_bytes", 0.0, "the bucket's size"),
        ("latency_s", -1e-6, "the latency"),
        ("intra_latency_s", -1e-6, "the latency within a host"),
        ("overhead_s", -1e-6, "the overhead"),
        ("overlap", 1.1, "overlap"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*Received: {value}"):
        replace(CLUSTER, **{field: value})


def test_a_speed_that_a_forecast_needs_is_asked_for() -> None:
    with pytest.raises(ValueError, match="the speed of the link between them is needed"):
        forecast(STEP, Cluster(), 2)
    with pytest.raises(ValueError, match="the speed between them is needed"):
        forecast(STEP, Cluster(ranks_per_host=2), 2)
    with pytest.raises(ValueError, match="ranks must be at least 1"):
        forecast(STEP, CLUSTER, 0)
