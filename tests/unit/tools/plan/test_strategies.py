"""The forecast of strategies of synchronization, held against what two hosts with a slow link took."""

from __future__ import annotations

import json
from typing import Any

import pytest
from in_process import plan

from hvdtrain.tools.plan.model import Cluster, Step, forecast
from hvdtrain.tools.plan.strategies import StrategyForecast, strategies, wanted, wanted_by_link

# As measured: an MLP of 20M parameters and momentum, two ranks on CPUs (`python -m benchmarks --link 1gbit`).
STEP = Step(compute_s=0.144, gradient_bytes=80.15e6, samples=64)
GIGABIT = Cluster(link_bytes_per_s=1e9 / 8, link_efficiency=1448 / 1538, overlap=0.0)


def by_name(found: list[StrategyForecast]) -> dict[str, StrategyForecast]:
    """Return those without compression of changes."""
    return {each.name.removeprefix("sync=").partition("(")[0]: each for each in found if "), comp" not in each.name}


def test_the_forecast_is_near_what_was_measured_over_a_gigabit_link() -> None:
    found = by_name(strategies(STEP, GIGABIT, 2, moments=1))
    measured = {"None": 0.814, 'compression="fp16"': 0.487, "LocalSGD": 0.302, "DiLoCo": 0.138}
    for name, step_s in measured.items():
        assert found[name].step_s == pytest.approx(step_s, rel=0.15), name
    assert found["None"].sent_bytes == 80.15e6
    assert found["LocalSGD"].sent_bytes == pytest.approx(21.0e6, rel=0.05)


def test_strategies_that_send_less_are_never_slower() -> None:
    for moments in (0, 1, 2):
        found = strategies(STEP, Cluster(link_bytes_per_s=1e8 / 8), 8, moments=moments)
        names = by_name(found)
        assert names["None"].step_s >= names["Delayed"].step_s >= STEP.compute_s
        assert names["None"].step_s >= names['compression="fp16"'].step_s
        assert names["LocalSGD"].step_s > names["DiLoCo"].step_s
        assert all(0 < each.efficiency <= 1 for each in found)


def test_compressed_changes_are_counted_with_the_averages_that_are_sent_as_bfloat16() -> None:
    for moments in (0, 1, 2):
        slow = Cluster(link_bytes_per_s=1e8 / 8)
        found = {each.name: each for each in strategies(STEP, slow, 2, moments=moments)}
        for name, every in (("LocalSGD", 8), ("DiLoCo", 100)):
            plain = found[f"sync={name}(every={every})"]
            compressed = found[f'sync={name}(every={every}), compression="powersgd:4"']
            assert compressed.sent_bytes == pytest.approx((8 / 1024 + moments / 2) * 80.15e6 / every)
            assert compressed.step_s < plain.step_s
            assert compressed.step_s >= STEP.compute_s + 0.6e-9 * 80.15e6 / every  # compressing takes a core's time


def test_a_step_with_delayed_gradients_takes_the_longer_one_of_computing_and_reducing() -> None:
    cluster = Cluster(link_bytes_per_s=1e9 / 8, overlap=1.0)
    found = by_name(strategies(STEP, cluster, 2, moments=0))["Delayed"]
    assert found.step_s == max(STEP.compute_s, forecast(STEP, cluster, 2).sync_s)


def test_ranks_that_step_alone_wait_less_for_the_slowest() -> None:
    uneven = Step(compute_s=0.1, gradient_bytes=8.0, samples=1, spread_s=0.01)
    cluster = Cluster(link_bytes_per_s=1e12, overhead_s=0.0, latency_s=0.0)
    found = by_name(strategies(uneven, cluster, 16, moments=0))
    waiting_s = forecast(uneven, cluster, 16).waiting_s
    assert found["DiLoCo"].step_s - 0.1 == pytest.approx(waiting_s / 10)


@pytest.mark.parametrize(
    ("bits_per_s", "name"),
    [(100e9, "sync=None"), (20e9, 'compression="fp16"'), (5e9, "sync=Delayed()"), (1e9, "sync=DiLoCo(every=100)")],
)
def test_the_first_strategy_that_is_fast_enough_is_wanted(bits_per_s: float, name: str) -> None:
    step = Step(compute_s=0.4, gradient_bytes=80e6, samples=64)
    cluster = Cluster(link_bytes_per_s=bits_per_s / 8, overhead_s=0.0, bucket_bytes=80e6)
    assert wanted(strategies(step, cluster, 8, moments=2)).name == name


@pytest.mark.parametrize(
    ("spread_s", "bits_per_s", "name", "by_link"),
    [
        (0.2, 12e9, "sync=None", "sync=None"),  # the link costs less than 10 %
        (0.5, 5e9, "sync=None", "sync=Delayed()"),  # it costs more, and waits still cost most
        (0.02, 5e9, "sync=Delayed()", "sync=Delayed()"),
        (0.05, 1e9, "sync=DiLoCo(every=100)", "sync=DiLoCo(every=100)"),
    ],
)
def test_no_strategy_is_wanted_for_waits_that_cost_more_than_the_link(
    spread_s: float, bits_per_s: float, name: str, by_link: str
) -> None:
    step = Step(compute_s=0.4, gradient_bytes=80e6, samples=64, spread_s=spread_s)
    cluster = Cluster(link_bytes_per_s=bits_per_s / 8, overhead_s=0.0, bucket_bytes=20e6)
    found = strategies(step, cluster, 8, moments=2)
    assert (wanted(found).name, wanted_by_link(found).name) == (name, by_link)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    assert plan(monkeypatch, "--step", "144ms", "--gradients", "80MB", *arguments) == 0


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    run(monkeypatch, "--batch-size", "64", *arguments)
    return " ".join(capsys.readouterr().out.split())


def test_the_command_says_which_strategy_a_link_wants(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = printed(monkeypatch, capsys, "--link", "1Gb/s", "--max-ranks", "2", "--moments", "1")
    assert "Strategies of synchronization, on 2 ranks:" in slow
    assert "On 2 ranks this link wants sync=DiLoCo(every=100): what stands above it changes less" in slow
    assert "send weights and momentum, twice the gradients' bytes (--moments 1)" in slow
    waits = printed(monkeypatch, capsys, "--link", "10Gb/s", "--max-ranks", "8", "--spread", "60ms")
    assert "most of the loss is waiting for the slowest rank: more even batches" in waits
    assert "On 8 ranks most of the loss is waiting for the slowest rank, 28% of a step; the link takes 25%." in waits
    assert "come before a strategy" in waits
    assert "after them, the link wants sync=Delayed()." in waits
    fast = printed(monkeypatch, capsys, "--link", "400Gb/s", "--max-ranks", "2")
    assert "On 2 ranks this link needs no strategy: gradients in every step reach 9" in fast
    hopeless = printed(monkeypatch, capsys, "--link", "1Mb/s", "--max-ranks", "2", "--moments", "0")
    assert "On 2 ranks nothing reaches 90%. sync=DiLoCo(every=100" in hopeless
    assert "Strategies" not in printed(monkeypatch, capsys, "--max-ranks", "1")


def test_json_has_the_strategies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "--batch-size", "64", "--link", "1Gb/s", "--max-ranks", "2", "--moments", "1", "--json")
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["wants"] == "sync=DiLoCo(every=100)"
    assert [each["name"] for each in document["strategies"]][:3] == [
        "sync=None",
        'compression="fp16"',
        "sync=Delayed()",
    ]
    assert document["moments"] == 1
