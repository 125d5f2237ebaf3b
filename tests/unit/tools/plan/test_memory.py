from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from in_process import assert_refused, document, plan

from hvdtrain.telemetry.memory import Parts
from hvdtrain.tools.plan.memory import MemoryPlan

# 1 GB of weights and gradients each, 2 GB of Adam's averages, 8 GB of activations for 16 samples.
ADAM = ["--memory", "--parameters", "250M", "--ranks", "4", "--activations", "8GB", "--batch-size", "16"]
PARTS = Parts(weights=1e9, gradients=1e9, optimizer=2e9, activations=8e9)


def by_options(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {", ".join(row["options"]): row for row in found["memory"]}


def test_a_rank_holds_what_the_numbers_say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(monkeypatch, capsys, *ADAM)
    plain = found["memory"][0]
    assert plain["options"] == []
    assert (plain["weights"], plain["gradients"], plain["optimizer"], plain["activations"]) == (1e9, 1e9, 2e9, 8e9)
    assert plain["buckets"] == 128 * 2**20
    assert plain["total"] == 12e9 + 128 * 2**20
    assert plain["fits"] is found["limit"] is found["wants"] is None


def test_each_option_shrinks_its_part_alone_and_all_shrink_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(monkeypatch, capsys, *ADAM)
    rows = by_options(found)
    assert rows["micro_batch=8"]["activations"] == 4e9
    assert rows['shard="optimizer"']["optimizer"] == 0.5e9
    assert (rows['shard="gradients"']["gradients"], rows['shard="gradients"']["optimizer"]) == (0.25e9, 0.5e9)
    assert rows['checkpoint_activations="blocks"']["activations"] == pytest.approx(0.45 * 8e9)
    assert rows['precision="bf16"']["activations"] == 4e9 + 0.5e9  # and the weights' copies in two bytes
    together = found["memory"][-1]
    assert len(together["options"]) == 4
    assert together["total"] == min(row["total"] for row in found["memory"])


def test_numbers_of_a_weight_and_its_bytes_are_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(monkeypatch, capsys, *ADAM, "--moments", "1", "--bytes-each", "2")["memory"][0]
    assert (found["weights"], found["gradients"], found["optimizer"]) == (0.5e9, 0.5e9, 0.5e9)


@pytest.mark.parametrize(
    ("limit", "wants"),
    [
        ("13GB", []),
        ("11GB", ["micro_batch=8"]),  # takes the same step, and sends nothing more
        ("6GB", ["micro_batch=2"]),
        ("4GB", ["micro_batch=2", 'shard="optimizer"']),
        ("3GB", ["micro_batch=2", 'shard="gradients"']),
        ("1GB", None),
    ],
)
def test_the_cheapest_combination_that_fits_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limit: str, wants: list[str] | None
) -> None:
    found = document(monkeypatch, capsys, *ADAM, "--limit", limit)
    assert found["wants"] == wants
    if wants is not None:
        row = by_options(found)[", ".join(wants)]
        assert row["fits"] is True
        assert row["total"] <= found["limit"]
    assert plan(monkeypatch, *ADAM, "--limit", limit) == 0
    words = " ".join(capsys.readouterr().out.split())
    verdict = {None: "Nothing fits into 1 GB", "": "It fits into 13 GB without any option"}
    named = None if wants is None else ", ".join(wants)
    assert verdict.get(named, f"those that cost least before others: {named}.") in words


def test_one_rank_has_nothing_to_share() -> None:
    names = {each.name for row in MemoryPlan(parts=PARTS, ranks=1, batch_size=2).rows() for each in row.options}
    assert names == {"micro_batch", "checkpoint_activations", "precision"}


def test_unknown_activations_are_said_to_be_unknown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, "--memory", "--parameters", "1e6", "--ranks", "2", "--limit", "1GB") == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "Activations are not known: give --activations" in words
    assert "checkpoint_activations" not in words
    assert words.endswith("It fits into 1 GB without any option before any activations.")


def test_what_bench_measured_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "bench.json"
    measured = {"weights": 8e6, "gradient_bytes": 7e6, "optimizer": 14e6, "buckets": 1e5, "activations": 3e7}
    path.write_text(json.dumps({"plan_input": measured | {"samples_per_step": 32, "ranks": 2, "step_s": 0.1}}))
    found = document(monkeypatch, capsys, "--memory", "--measured", str(path), "--ranks", "4")
    plain = found["memory"][0]
    assert (found["ranks"], found["batch_size"]) == (4, 32)
    assert (plain["weights"], plain["gradients"], plain["optimizer"]) == (8e6, 7e6, 14e6)
    assert (plain["buckets"], plain["activations"]) == (1e5, 3e7)
    given = document(monkeypatch, capsys, "--memory", "--measured", str(path), "--parameters", "1M")["memory"][0]
    assert (given["weights"], given["gradients"], given["optimizer"], given["activations"]) == (4e6, 4e6, 8e6, 3e7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory"], "--parameters, --ranks missing: give them, or a --measured file"),
        (["--memory", "--parameters", "1M"], "--ranks missing: give it, or a --measured file"),
        (["--memory", "--parameters", "1X", "--ranks", "2"], "--parameters must be a number, such as 350M"),
        (["--memory", "--parameters", "0", "--ranks", "2"], "the size of the weights (bytes) must be above 0"),
        (["--memory", "--parameters", "nan", "--ranks", "2"], "the size of the weights (bytes) must be above 0"),
        ([*ADAM, "--ranks", "0"], "--ranks must be a whole number, at least 1. Received: 0"),
        ([*ADAM, "--limit", "24"], "'24' is not a size"),
        ([*ADAM, "--limit", "0GB"], "the limit (bytes) must be above 0 and finite"),
        ([*ADAM, "--bytes-each", "0"], "--bytes-each must be a whole number, at least 1"),
        ([*ADAM, "--batch-size", "0"], "a rank's samples in a step must be above 0"),
        (["--parameters", "1M", "--step", "1s"], "--parameters is for --memory"),
        (["--ranks", "2", "--limit", "1GB"], "--ranks, --limit are for --memory"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert_refused(monkeypatch, capsys, arguments, message)
