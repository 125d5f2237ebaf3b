"""The arithmetic of benchmarks/plan_check.py; the measurements themselves need a quiet machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan_check


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand in for the processes: two links, and step times in ms."""
    links = [{"gradient_bytes": 8e7, "overhead_s": 1e-3, "bytes_per_s": rate} for rate in (3e9, 5e9)]
    steps = {name: {"status": "ok", "step_ms": ms} for name, ms in (("single", 95), ("alone", 100), ("hvdtrain", 120))}
    monkeypatch.setattr(plan_check.asked, "keep_to_cores", lambda ranks: None)
    monkeypatch.setattr(plan_check, "measure_link", lambda workload: links.pop(0))
    monkeypatch.setattr(plan_check.steps, "measure", lambda workload, peers, plan, say: {"peers": steps})
    return steps


def test_two_ranks_are_forecast_from_one_and_the_link(measured: dict[str, Any], tmp_path: Path) -> None:
    assert plan_check.main(["--workload", "mlp", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "plan_check.json").read_text())["checks"]["mlp"]
    # 80 MB in two buckets: twice 1 ms to start, 80 MB over the 4 GB/s between the two measurements; nothing is hidden.
    assert found["sync_s"] == pytest.approx(0.022)
    assert found["forecast_s"] == pytest.approx(0.122)
    assert found["error"] == pytest.approx(0.122 / 0.120 - 1)


def test_a_forecast_that_misses_is_a_failure(measured: dict[str, Any], tmp_path: Path) -> None:
    measured["hvdtrain"]["step_ms"] = 150
    assert plan_check.main(["--workload", "mlp", "--out", str(tmp_path)]) == 1


def test_a_peer_that_fails_is_named(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured["alone"] |= {"status": "failed", "why": "a rank has ended"}
    assert plan_check.main(["--workload", "mlp", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "plan_check: mlp/alone: a rank has ended\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--workload", "mlp,keras-jax-mlp"], "no PyTorch workload is called 'keras-jax-mlp'. There are: lenet, mlp"),
        (["--rounds", "0"], "--rounds must be > 0 and finite. Received: 0"),
        (["--seconds", "nan"], "--seconds must be > 0 and finite. Received: nan"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_check, "check", lambda workload, plan: pytest.fail("measured"))
    assert plan_check.main([*arguments, "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"plan_check: {line}")
    assert printed.count("\n") == 1
