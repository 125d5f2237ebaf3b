"""Measure the Trainer's own cost: a model of 10 parameters, one process, against a bare loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks import catalog, facts, steps
from benchmarks.catalog import Peer
from benchmarks.groups import GroupError
from benchmarks.steps import Plan
from benchmarks.workloads import TINY
from hvdtrain.telemetry.step_times import Spread

_PEERS = (
    Peer("single", "bare loop", "plain", "python", environment=catalog.ONE_THREAD, ranks=1),
    Peer("trainer", "hvdtrain, Trainer", "trainer", "python", environment=catalog.ONE_THREAD, ranks=1),
)


def measure(plan: Plan, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Return what results/overhead.json holds. Means, not medians: what is done now and then costs too."""
    measured = steps.measure(TINY, _PEERS, replace(plan, ranks=1, warm_up=50), say=say)
    peers = measured["peers"]
    if any(peer["status"] != "ok" for peer in peers.values()):
        raise GroupError(f"overhead: {[peer.get('why', '') for peer in peers.values()]}")
    bare, ours = (peers[peer.name]["block_mean_ms"] for peer in _PEERS)
    extra = Spread.of([1000 * (b - a) for a, b in zip(bare, ours, strict=True)])
    say(f"the Trainer adds {extra} us a step")
    return {
        "kind": "rows",
        "title": "The Trainer's own cost: 10 parameters, one process",
        "columns": ["loop", "us a step, mean", "us a step, median"],
        "rows": [[peer["title"], 1000 * peer["mean_ms"], 1000 * peer["step_ms"]] for peer in peers.values()],
        "peers": peers,
        "extra_us": vars(extra),
        **facts.collect(),
    }
