"""Ratios are taken turn by turn, and targets judged by their median."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import targets
from benchmarks.stats import ratio
from hvdtrain.telemetry.step_times import Spread


def steps(**block_ms: list[float]) -> dict[str, Any]:
    return {"kind": "steps", "peers": {name: {"status": "ok", "block_ms": ms} for name, ms in block_ms.items()}}


def test_what_slows_both_peers_down_cancels_out_of_their_ratio() -> None:
    result = steps(ddp=[10.0, 30.0, 20.0], trainer=[9.0, 27.0, 18.0])
    found = ratio(result, "trainer", "ddp")
    assert found is not None
    assert (found.low, found.median, found.high) == pytest.approx((0.9, 0.9, 0.9))


def test_a_peer_that_was_skipped_has_no_ratio() -> None:
    result = steps(ddp=[1.0])
    result["peers"]["trainer"] = {"status": "skipped", "why": "not installed: horovod"}
    assert ratio(result, "trainer", "ddp") is None


def test_a_target_is_met_at_its_limit_missed_above_it_and_open_without_a_figure() -> None:
    verdicts = {v.text: v for v in targets.check({"mlp": steps(ddp=[100.0], trainer=[72.0], hvdtrain=[73.0])})}
    assert verdicts["mlp: trainer / DDP, step time"].met is True
    assert verdicts["mlp: hvdtrain / DDP, step time"].met is False
    assert verdicts["lenet: trainer / DDP, step time"].met is None


def test_a_target_whose_quartiles_cross_its_limit_is_unsure_and_judged_by_its_median() -> None:
    def verdict(low: float, median: float, high: float) -> tuple[bool | None, bool]:
        found = targets.Verdict("t", 1.0, Spread(median, low, high))
        return found.met, found.sure

    assert verdict(0.8, 0.9, 1.0) == (True, True)
    assert verdict(0.8, 0.9, 1.1) == (True, False)
    assert verdict(1.0, 1.1, 1.2) == (False, False)
    assert verdict(1.01, 1.1, 1.2) == (False, True)
    assert targets.Verdict("t", 1.0, None).sure


def test_figures_of_another_number_of_ranks_are_no_verdict() -> None:
    result = {**steps(ddp=[100.0], trainer=[60.0]), "ranks": 4}
    assert all(each.met is None for each in targets.check({"mlp": result}))


def test_every_kind_of_target_is_judged_from_its_own_result() -> None:
    spread = vars(Spread(1.0, 1.0, 1.0))
    results = {
        "lenet": steps(ddp=[10.0], trainer=[8.0], **{"horovod-tuned": [8.0]}),
        "keras-tensorflow-mlp": steps(single=[10.0], trainer=[14.0]),
        "keras-torch-mlp": steps(trainer=[10.0], **{"torch-trainer": [10.0]}),
        "startup": {"kind": "rows", "ratios": {"trainer": spread}},
        "overhead": {"kind": "rows", "extra_us": vars(Spread(120.0, 110.0, 130.0))},
    }
    for name, peak in (("ddp", 300.0), ("trainer", 310.0)):
        results["lenet"]["peers"][name]["peak_mib"] = peak
    met = {v.text: v.met for v in targets.check(results) if v.measured}
    assert met == {
        "lenet: trainer / DDP, step time": True,
        "lenet: trainer / hand-tuned Horovod, step time": True,
        "keras-tensorflow-mlp: trainer / one process, step time": False,
        "keras-torch-mlp: trainer / Trainer on plain PyTorch, step time": True,
        "lenet: trainer / DDP, peak memory of a rank": False,
        "start to first step: trainer / torchrun + DDP": True,
        "Trainer's own cost, us a step of 10 parameters": False,
    }
