"""Samples a second on 1, 2 and 4 ranks, batch per rank fixed; ranks beyond the cores are labelled so."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks import catalog, facts, steps
from benchmarks.steps import Plan
from benchmarks.workloads import WORKLOADS as ALL

RANKS = (1, 2, 4)
WORKLOADS = ("lenet", "convnet")
PEERS = ("ddp", "trainer")


def measure(
    workloads: Sequence[str], names: Sequence[str], plan: Plan, *, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return what results/scaling.json holds."""
    cores = len(os.sched_getaffinity(0))
    rows: list[list[Any]] = []
    raw: dict[str, Any] = {}
    for workload in (ALL[name] for name in WORKLOADS if name in workloads):
        peers = [
            # One thread a rank on any number of them: alone, the Trainer would leave a rank all cores.
            replace(peer, name=f"{peer.name}-{ranks}", ranks=ranks, environment=catalog.ONE_THREAD)
            for peer in catalog.TORCH
            if peer.name in PEERS and peer.name in names
            for ranks in RANKS
        ]
        measured = steps.measure(workload, peers, replace(plan, ranks=max(RANKS)), say=say)["peers"]
        raw |= {f"{workload.name}/{name}": entry for name, entry in measured.items()}
        for name, entry in measured.items():
            if entry["status"] != "ok":
                continue
            alone = measured[f"{name.rpartition('-')[0]}-1"].get("samples_per_s")
            label = f"{entry['ranks']} (oversubscribed: {cores} cores)" if entry["ranks"] > cores else entry["ranks"]
            gain = entry["samples_per_s"] / alone if alone else ""
            rows.append([workload.name, entry["title"], label, entry["step_ms"], entry["samples_per_s"], gain])
    return {
        "kind": "rows",
        "title": "Scaling with the number of ranks",
        "columns": ["workload", "peer", "ranks", "ms a step", "samples/s", "x 1 rank"],
        "rows": rows,
        "peers": raw,
        **facts.collect(),
    }
