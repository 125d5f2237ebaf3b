"""Step times of several peers on one workload: turn by turn, and checked for what they train."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import catalog, facts
from benchmarks.catalog import Peer
from benchmarks.groups import Group, GroupError
from benchmarks.stats import ratio
from benchmarks.workloads import Workload

# What every peer is held against in the JSON.
BASES = ("single", "alone", "ddp", "horovod-tuned")
CHECK_STEPS = 5
# A step that ranks did not average, or averaged wrongly, is wrong by about its own length; rounding is far below this.
UPDATE_TOLERANCE = 0.02
LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        ranks: processes of a distributed peer.
        rounds: turns of each peer in each launch.
        launches: how often all peers are started anew.
        seconds: length of a turn.
        warm_up: steps at the start of each turn that do not count.
        horovod_python: interpreter with the Horovod of the plain Horovod peers.
    """

    ranks: int = 2
    rounds: int = 5
    launches: int = 2
    seconds: float = 2.0
    warm_up: int = 3
    horovod_python: str | None = None


def measure(workload: Workload, peers: Sequence[Peer], plan: Plan, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure `peers` side by side and return what results/WORKLOAD.json holds."""
    result: dict[str, Any] = {"kind": "steps", "workload": workload.name, "title": workload.title,
                              "batch_per_rank": workload.batch_size, "ranks": plan.ranks, "plan": vars(plan),
                              **facts.collect(), "peers": {}}  # fmt: skip
    runnable = []
    for peer in peers:
        entry = result["peers"][peer.name] = {"title": peer.title, "ranks": peer.ranks or plan.ranks, "status": "ok"}
        if why := peer.missing():
            entry |= {"status": "skipped", "why": why}
            say(f"{peer.name}: skipped, {why}")
        else:
            runnable.append(peer)
    comparable = any(peer.averages for peer in runnable)
    reference = _check(workload, catalog.REFERENCE, plan)[0] if comparable else None
    for _ in range(plan.launches):
        launch(workload, runnable, plan, result["peers"], reference, say=say)
    for peer in runnable:
        entry = result["peers"][peer.name]
        entry["environment"] = {name: value for name, value in peer.environment.items() if not name.startswith("BENCH")}
        if entry["status"] == "ok":
            entry |= _figures(entry, workload)
    result["ratios"] = {
        f"{peer.name}/{base}": vars(found)
        for base in BASES
        for peer in runnable
        if (found := ratio(result, peer.name, base))
    }
    return result


def launch(
    workload: Workload,
    peers: Sequence[Peer],
    plan: Plan,
    entries: dict[str, Any],
    reference: dict[str, Any] | None,
    *,
    say: Callable[[str], None],
) -> None:
    """Start every peer, check it, and let them take turns; adds to `entries`."""
    groups: dict[str, Group] = {}
    steps: dict[str, int] = {}
    try:
        for peer in peers:
            if entries[peer.name]["status"] != "ok":
                continue
            entry = entries[peer.name]
            group = groups[peer.name] = _start(workload, peer, plan)
            with _Failures(peer, groups, entry, say):
                group.connect()
                answers = group.turn("check", steps=CHECK_STEPS)
                comparable = group.ranks == plan.ranks and not peer.workload
                entry["check"] = compare(peer, answers, reference if comparable else None)
                steps[peer.name] = _steps_of(group, plan)
                group.pause()
        for turn in range(plan.rounds):
            order = list(groups) if turn % 2 == 0 else list(groups)[::-1]  # what drifts hits both ends alike
            for name in order:
                peer = next(each for each in peers if each.name == name)
                with _Failures(peer, groups, entries[name], say):
                    groups[name].resume()
                    answers = groups[name].turn("run", steps=plan.warm_up + steps[name])
                    groups[name].pause()
                    _note(entries[name], answers, plan.warm_up)
        for name, group in list(groups.items()):
            peer = next(each for each in peers if each.name == name)
            with _Failures(peer, groups, entries[name], say):
                group.resume()
                _finish(peer, entries[name], group.turn("end"))
    finally:
        for group in groups.values():
            group.close()


class _Failures:
    """Lets one peer fail without the others: notes why, and takes its group out of the round."""

    def __init__(self, peer: Peer, groups: dict[str, Group], entry: dict[str, Any], say: Callable[[str], None]) -> None:
        self._peer, self._groups, self._entry, self._say = peer, groups, entry, say

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, GroupError):
            return False
        self._groups.pop(self._peer.name).close()
        self._entry |= {"status": "failed", "why": str(error)}
        self._say(f"{self._peer.name}: FAILED, {error}")
        return True


def _start(workload: Workload, peer: Peer, plan: Plan) -> Group:
    return Group(peer, workload, ranks=plan.ranks, data_ranks=plan.ranks, horovod_python=plan.horovod_python)


def _check(workload: Workload, peer: Peer, plan: Plan) -> list[dict[str, Any]]:
    group = _start(workload, peer, plan)
    try:
        group.connect()
        return group.turn("check", steps=CHECK_STEPS)
    finally:
        group.close()


def _steps_of(group: Group, plan: Plan) -> int:
    """Return how many steps fill a turn, from a first short one."""
    answers = group.turn("run", steps=plan.warm_up + 3)
    step_s = statistics.median(answers[0]["step_s"][plan.warm_up :])
    return max(5, math.ceil(plan.seconds / step_s))


def compare(peer: Peer, answers: list[dict[str, Any]], reference: dict[str, Any] | None) -> dict[str, Any]:
    """Return how the first steps of a peer compare with one process over all ranks' batches.

    Raises:
        GroupError: ranks differ, or the peer trains something else.
    """
    check: dict[str, Any] = {"loss": answers[0]["loss"]}
    if not peer.averages:
        return check
    check["ranks_equal"] = len({answer["digest"] for answer in answers}) == 1
    if not check["ranks_equal"]:
        raise GroupError(f"trains wrongly: after {CHECK_STEPS} steps its ranks hold different weights")
    if reference is None:
        return check
    expected, found = reference["update"], answers[0]["update"]
    check["update_error"] = math.dist(expected, found) / math.hypot(*expected)
    check["loss_error"] = abs(answers[0]["loss"] - reference["loss"]) / abs(reference["loss"])
    if check["update_error"] > UPDATE_TOLERANCE or check["loss_error"] > LOSS_TOLERANCE:
        raise GroupError(
            f"trains wrongly: its first {CHECK_STEPS} steps are {check['update_error']:.1%} off those of one process "
            f"with all batches, its loss is {answers[0]['loss']:.6f} instead of {reference['loss']:.6f}"
        )
    return check


def _note(entry: dict[str, Any], answers: list[dict[str, Any]], warm_up: int) -> None:
    """Add one turn. Ranks leave each exchange together, so the steps of all of them are pooled."""
    pooled = [step for answer in answers for step in answer["step_s"][warm_up:]]
    entry.setdefault("block_s", []).append(statistics.median(pooled))
    entry.setdefault("block_mean_s", []).append(statistics.fmean(pooled))
    steps = len(answers[0]["step_s"])
    entry.setdefault("cpu_s", []).append(statistics.fmean(answer["cpu_s"] for answer in answers) / steps)


def _finish(peer: Peer, entry: dict[str, Any], answers: list[dict[str, Any]]) -> None:
    if peer.averages and len({answer["digest"] for answer in answers}) != 1:
        raise GroupError("trains wrongly: in the end its ranks hold different weights")
    peak = max(answer["peak_kib"] for answer in answers) / 1024
    entry["peak_mib"] = round(max(peak, entry.get("peak_mib", 0.0)), 1)
    entry["threads"] = answers[0]["threads"]


def _figures(entry: dict[str, Any], workload: Workload) -> dict[str, Any]:
    blocks = [1000 * block for block in entry.pop("block_s")]
    means = [1000 * mean for mean in entry.pop("block_mean_s")]
    median = statistics.median(blocks)
    return {
        "step_ms": round(median, 4),
        "block_ms": [round(block, 4) for block in blocks],
        "mean_ms": round(statistics.median(means), 4),
        "block_mean_ms": [round(mean, 4) for mean in means],
        "cpu_ms": round(1000 * statistics.median(entry.pop("cpu_s")), 4),
        "samples_per_s": round(entry["ranks"] * workload.batch_size / median * 1000, 1),
    }
