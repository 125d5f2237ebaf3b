"""Measure the Trainer as the data grows from 10^3 to 10^7 samples: memory, an epoch's start, a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks import catalog, facts
from benchmarks.groups import Group, GroupError
from benchmarks.steps import Plan
from benchmarks.workloads import TINY

SAMPLES = tuple(10**power for power in range(3, 8))
_PEER = next(peer for peer in catalog.TORCH if peer.name == "trainer")


def measure(plan: Plan, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Return what results/growth.json holds: each size in fresh processes, the data itself in no memory."""
    if why := _PEER.missing():
        raise GroupError(f"growth: {why}")
    rows = []
    for samples in SAMPLES:
        peer = replace(_PEER, script="growth", environment={"BENCH_SAMPLES": str(samples)})
        group = Group(peer, TINY, ranks=plan.ranks, data_ranks=plan.ranks)
        try:
            answers = [hello["result"] for hello in group.connect()]
        finally:
            group.close()
        worst = {name: max(answer[name] for answer in answers) for name in answers[0]}
        rows.append(
            [f"{samples:,}", worst["peak_mib"], worst["fit_start_ms"], worst["epoch_start_ms"], worst["step_us"]]
        )
        say(f"{samples:,} samples: {worst}")
    return {
        "kind": "rows",
        "title": f"The Trainer as the data grows, {plan.ranks} ranks (slowest rank)",
        "columns": ["samples", "MiB that fit adds", "ms until the first epoch", "ms an epoch begins", "us a step"],
        "rows": rows,
        **facts.collect(),
    }
