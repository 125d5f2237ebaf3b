"""From the command to the end of the first step: everything is started anew each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import catalog, facts
from benchmarks.catalog import Peer
from benchmarks.groups import Group
from benchmarks.steps import Plan
from benchmarks.workloads import WORKLOADS
from hvdtrain.telemetry.step_times import Spread

PEERS = ("ddp", "horovod", "hvdtrain", "trainer")


def measure(names: Sequence[str], plan: Plan, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Start each peer on the LeNet once a round, and return what results/startup.json holds."""
    peers = [peer for peer in catalog.TORCH if peer.name in PEERS and peer.name in names and not peer.missing()]
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for turn in range(plan.rounds + 1):  # the first only brings files into memory
        for peer in peers if turn % 2 == 0 else peers[::-1]:
            taken = _start(peer, plan)
            if turn:
                seconds[peer.name].append(round(taken, 4))
    rows = []
    ratios = {}
    for peer in peers:
        own = Spread.of(seconds[peer.name])
        against = ""
        if "ddp" in seconds:
            ratio = Spread.of([a / b for a, b in zip(seconds[peer.name], seconds["ddp"], strict=True)])
            ratios[peer.name], against = vars(ratio), str(ratio)
        rows.append([peer.title, plan.ranks, str(own), against])
        say(f"{peer.name}: {own} s")
    return {
        "kind": "rows",
        "title": f"Start to the first finished step, LeNet, {plan.ranks} ranks",
        "ranks": plan.ranks,
        "columns": ["peer", "ranks", "seconds", "/ DDP"],
        "rows": rows,
        "seconds": seconds,
        "ratios": ratios,
        **facts.collect(),
    }


def _start(peer: Peer, plan: Plan) -> float:
    """Return the seconds until the slowest rank has taken one step."""
    group = Group(peer, WORKLOADS["lenet"], ranks=plan.ranks, data_ranks=plan.ranks, horovod_python=plan.horovod_python)
    try:
        group.connect()
        return max(answer["done_at"] for answer in group.turn("run", steps=1)) - group.started_at
    finally:
        group.close()
