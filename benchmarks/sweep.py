"""The hand-tuned peer's search: which of the declared settings is fastest on a workload, on Horovod's own terms."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks import catalog, facts
from benchmarks.catalog import Peer
from benchmarks.groups import GroupError
from benchmarks.steps import Plan, launch
from benchmarks.workloads import Workload

TUNED = next(peer for peer in catalog.TORCH if peer.name == "horovod-tuned")


def measure(workload: Workload, plan: Plan, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Return what results/sweep-WORKLOAD.json holds: each candidate's median step, the fastest first.

    Raises:
        GroupError: no candidate runs.
    """
    candidates = catalog.sweep_of(TUNED)
    entries: dict[str, Any] = {each.name: {"status": "ok"} for each in candidates}
    short = replace(plan, rounds=max(2, plan.rounds // 2), seconds=plan.seconds / 2)
    launch(workload, candidates, short, entries, None, say=lambda line: None)
    times = {name: round(1000 * statistics.median(entry["block_s"]), 3)
             for name, entry in entries.items() if entry["status"] == "ok"}  # fmt: skip
    if not times:
        raise GroupError(f"no setting of {TUNED.name} runs: {next(iter(entries.values()))['why']}")
    ranked = sorted(times.items(), key=lambda item: item[1])
    say(f"{TUNED.name}: best of {len(times)} settings is {ranked[0][0]}, {ranked[0][1]} ms")
    return {
        "kind": "rows",
        "title": f"Plain Horovod's settings: {workload.title}, {plan.ranks} ranks",
        "columns": ["setting", "ms a step"],
        "rows": [list(row) for row in ranked],
        **facts.collect(),
    }


def best(result: dict[str, Any] | None) -> Peer:
    """Return the hand-tuned peer with the fastest of the settings that `measure` has tried.

    Without a result, or where its winner is none of today's settings: with no fusion, which is what usually wins, and
    a title that says that nobody looked.
    """
    candidates = {each.name: each for each in catalog.sweep_of(TUNED)}
    winner = result["rows"][0][0] if result else None
    if winner not in candidates:
        unfused = next(each for each in candidates.values() if each.environment["HOROVOD_FUSION_THRESHOLD"] == "0")
        return replace(unfused, name=TUNED.name, title="plain Horovod, no fusion (no sweep made)")
    return replace(candidates[winner], name=TUNED.name)
