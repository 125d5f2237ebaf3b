"""Made-up runs: folders with what RunFolder writes, of any number of ranks, starts and gaps."""

from __future__ import annotations

import json

import pytest


def _interval(step, *, data=(0.001,), compute=(0.002,), reduction=None, other=None, rate=100.0, **more):
    """Return a line of metrics.jsonl; a step lasts as long as its slowest rank's parts."""
    other = other or [0.0] * len(data)
    alone = [sum(parts) for parts in zip(data, compute, other, strict=True)]
    waits = reduction or [max(alone) - own for own in alone]
    parts = {"data": list(data), "compute": list(compute), "reduction": list(waits), "other": list(other)}
    parts["step"] = [max(alone)] * len(data)
    line = {
        "time": 1e9 + step, "kind": "interval", "epoch": 0, "step": step, "global_step": step,
        "samples_per_s": rate, "learning_rate": 0.1, "metrics": {"loss": 1 / step}, "rank_s": parts,
    }  # fmt: skip
    return line | more


def _epoch(step, number=0, **metrics):
    return {"time": 1e9 + step, "kind": "epoch", "epoch": number, "global_step": step, "metrics": metrics}


@pytest.fixture
def interval():
    return _interval


@pytest.fixture
def epoch():
    return _epoch


@pytest.fixture
def made(tmp_path):
    """Return what writes a run's folder."""

    def make(lines, name="run", *, config=None, environment=None, tail=""):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        whole = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(whole + tail)
        ranks = max(
            (len(line["rank_s"]["step"]) for line in lines if isinstance(line, dict) and line.get("rank_s")), default=1
        )
        config = config if config is not None else {"model": "Net", "seed": 0, "data": {"number of samples": 12}}
        (folder / "config.json").write_text(json.dumps(config))
        environment = (
            environment
            if environment is not None
            else {"ranks": ranks, "hosts": ["a", "b"] * (ranks // 2) or ["a"], "python": "3.11"}
        )
        (folder / "environment.json").write_text(json.dumps(environment))
        return folder

    return make
