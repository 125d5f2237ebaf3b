"""The forecast of compressed gradients, and the links on which they pay."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from in_process import plan

from hvdtrain.tools.plan.compressions import COMPRESSIONS, compressions
from hvdtrain.tools.plan.model import Cluster, Step, forecast

STEP = Step(compute_s=0.144, gradient_bytes=80.15e6, samples=64)
GIGABIT = Cluster(link_bytes_per_s=1e9 / 8, link_efficiency=1448 / 1538, overlap=0.0)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("overlap", [0.0, 1.0])
def test_a_scheme_pays_below_its_link_and_not_above(ranks: int, overlap: float) -> None:
    cluster = replace(GIGABIT, overlap=overlap)
    for index, each in enumerate(compressions(STEP, cluster, ranks)):
        assert each.pays_below is not None
        for factor, pays in ((0.98, True), (1.02, False)):
            there = replace(cluster, link_bytes_per_s=each.pays_below * factor)
            found = compressions(STEP, there, ranks)[index]
            assert (found.step_s < forecast(STEP, there, ranks).step_s) is pays, each.name


def test_bytes_are_those_of_the_formulas() -> None:
    """What a rank sends on 4 ranks, of n numbers: see "Gradients in fewer bytes" in the docs."""
    numbers, ranks = STEP.gradient_bytes / 4, 4
    fp16, int8, topk, powersgd = (each.sent_bytes for each in compressions(STEP, GIGABIT, ranks))
    assert fp16 == pytest.approx(2 * 3 / 4 * numbers * 2)
    assert int8 == pytest.approx(2 * 3 / 4 * numbers * 260 / 256)
    assert topk == pytest.approx(3 * 0.08 * numbers / 2 * 2)
    assert powersgd == pytest.approx(2 * 3 / 4 * 4 * numbers / 1024**2 * 4 * 2 * 1024)


def test_a_scheme_that_costs_more_time_pays_on_slower_links_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = compressions(STEP, GIGABIT, 2)
    dear = tuple(replace(each, seconds_per_byte=10 * each.seconds_per_byte) for each in COMPRESSIONS)
    monkeypatch.setattr("hvdtrain.tools.plan.compressions.COMPRESSIONS", dear)
    for before, after in zip(cheap, compressions(STEP, GIGABIT, 2), strict=True):
        assert after.pays_below is not None
        assert before.pays_below is not None
        assert after.pays_below < before.pays_below


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    assert plan(monkeypatch, "--step", "144ms", "--gradients", "80MB", "--batch-size", "64", *arguments) == 0


def test_the_command_says_below_which_link_each_pays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--link", "1Gb/s", "--max-ranks", "2")
    text = " ".join(capsys.readouterr().out.split())
    assert "Gradients in fewer bytes, on 2 ranks:" in text
    assert text.count("Gb/s") >= 4
    run(monkeypatch, "--link", "1Gb/s", "--max-ranks", "2", "--json")
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in document["compressions"]] == [each.name for each in COMPRESSIONS]
    run(monkeypatch, "--intra", "10GB/s", "--ranks-per-host", "2", "--max-ranks", "2")
    assert "fewer bytes" not in capsys.readouterr().out
