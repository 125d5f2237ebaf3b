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
BASES = ("single", "alone", "ddp", "ddp-kept", "horovod-tuned")
CHECK_STEPS = 5
Start = Callable[[Workload, Peer, "Plan"], Group]
STARTED_AT_ONCE = 3
# A step that ranks did not average, or averaged wrongly, is wrong by about its own length; rounding is far below this.
UPDATE_TOLERANCE = 0.02
LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Plan:
    """The options of a measurement.

    Attributes:
        ranks: processes of a distributed peer.
        rounds: turns of each peer in each launch.
        launches: how often all peers are started anew.
        seconds: length of a turn.
        warm_up: steps at the start of each turn that do not count.
        least_steps: that count in a turn, however long it gets.
        horovod_python: interpreter with the Horovod of the plain Horovod peers.
    """

    ranks: int = 2
    rounds: int = 5
    launches: int = 2
    seconds: float = 2.0
    warm_up: int = 3
    least_steps: int = 5
    horovod_python: str | None = None


def measure(
    workload: Workload, peers: Sequence[Peer], plan: Plan, *, say: Callable[[str], None], start: Start | None = None
) -> dict[str, Any]:
    """Measure `peers` side by side and return what results/WORKLOAD.json holds; `start` starts them elsewhere."""
    start = start or _start
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
    comparable = any(peer.averages and peer.has_reference for peer in runnable)
    reference = _check(start(workload, catalog.REFERENCE, plan))[0] if comparable else None
    for _ in range(plan.launches):
        launch(workload, runnable, plan, result["peers"], reference, say=say, start=start)
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
    start: Start | None = None,
) -> None:
    """Start every peer, check it, and let them take turns; adds to `entries`, by the peer's name."""
    started = _Launch(workload, plan, entries, reference, say, start or _start)
    try:
        started.start([peer for peer in peers if entries[peer.name]["status"] == "ok"])
        started.each(started.check)
        for turn in range(plan.rounds):
            started.each(started.measure, backwards=turn % 2 == 1)  # what drifts hits both ends alike
        started.each(started.finish)
        started.close()
    finally:
        started.close(grace_s=0)  # of an interrupted run, stopped processes would stay for ever


class _Launch:
    """The groups of one launch. Each is paused except while it acts; one that fails leaves, and the others go on."""

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        entries: dict[str, Any],
        reference: dict[str, Any] | None,
        say: Callable[[str], None],
        start: Start,
    ) -> None:
        self._workload, self._plan, self._entries, self._reference = workload, plan, entries, reference
        self._say, self._start_group = say, start
        self._groups: dict[str, Group] = {}
        self._steps: dict[str, int] = {}

    def start(self, peers: Sequence[Peer]) -> None:
        """Start the groups, a few at a time: a launcher leaves cores idle."""
        for first in range(0, len(peers), STARTED_AT_ONCE):
            chunk = peers[first : first + STARTED_AT_ONCE]
            for peer in chunk:
                self._groups[peer.name] = self._start_group(self._workload, peer, self._plan)
            self.each(lambda name, group: group.connect(), only=[peer.name for peer in chunk])

    def each(self, act: Callable[[str, Group], Any], *, backwards: bool = False, only: Sequence[str] = ()) -> None:
        """Let one group after another act, all others paused."""
        names = list(only or self._groups)
        for name in reversed(names) if backwards else names:
            group = self._groups[name]
            try:
                group.resume()
                act(name, group)
                group.pause()
            except GroupError as error:
                self._groups.pop(name).close()
                self._entries[name] |= {"status": "failed", "why": str(error)}
                self._say(f"{name}: FAILED, {error}")

    def check(self, name: str, group: Group) -> None:
        """Take the steps that are checked, and find out how many fill a turn."""
        answers = group.turn("check", steps=CHECK_STEPS)
        comparable = group.ranks == self._plan.ranks and not group.peer.workload
        self._entries[name]["check"] = compare(group.peer, answers, self._reference if comparable else None)
        warm_up = _warm_up(group.peer, self._plan)
        times = group.turn("run", steps=warm_up + 3)[0]["step_s"]
        steps = max(self._plan.least_steps, math.ceil(self._plan.seconds / statistics.median(times[warm_up:])))
        self._steps[name] = group.peer.cycle * math.ceil(steps / group.peer.cycle)

    def measure(self, name: str, group: Group) -> None:
        """Take a turn."""
        warm_up = _warm_up(group.peer, self._plan)
        answers = group.turn("run", steps=warm_up + self._steps[name])
        _note(group.peer, self._entries[name], answers, warm_up)

    def finish(self, name: str, group: Group) -> None:
        """Let the group end."""
        _finish(group.peer, self._entries[name], group.turn("end"))

    def close(self, *, grace_s: float = 10) -> None:
        """End what is still there."""
        while self._groups:
            self._groups.popitem()[1].close(grace_s=grace_s)


def _start(workload: Workload, peer: Peer, plan: Plan) -> Group:
    return Group(peer, workload, ranks=plan.ranks, data_ranks=plan.ranks, horovod_python=plan.horovod_python)


def _warm_up(peer: Peer, plan: Plan) -> int:
    """Return how many steps begin a turn without counting: whole cycles, as what is sent counts from the first one."""
    return peer.cycle * math.ceil(plan.warm_up / peer.cycle)


def _check(group: Group) -> list[dict[str, Any]]:
    try:
        group.connect()
        return group.turn("check", steps=CHECK_STEPS)
    finally:
        group.close()


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


def _note(peer: Peer, entry: dict[str, Any], answers: list[dict[str, Any]], warm_up: int) -> None:
    """Add one turn. Ranks leave each exchange together, so the steps of all of them are pooled."""
    pooled = [step for answer in answers for step in answer["step_s"][warm_up:]]
    entry.setdefault("block_s", []).append((statistics.median if peer.cycle == 1 else statistics.fmean)(pooled))
    entry.setdefault("block_mean_s", []).append(statistics.fmean(pooled))
    steps = len(answers[0]["step_s"])
    entry.setdefault("cpu_s", []).append(statistics.fmean(answer["cpu_s"] for answer in answers) / steps)
    if "sent_bytes" in answers[0]:
        entry.setdefault("sent_bytes_a_turn", []).append(max(answer["sent_bytes"] for answer in answers) / steps)


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
    sent = entry.pop("sent_bytes_a_turn", None)
    return {
        **({"sent_bytes": round(statistics.median(sent))} if sent else {}),
        "step_ms": round(median, 4),
        "block_ms": [round(block, 4) for block in blocks],
        "mean_ms": round(statistics.median(means), 4),
        "block_mean_ms": [round(mean, 4) for mean in means],
        "cpu_ms": round(1000 * statistics.median(entry.pop("cpu_s")), 4),
        "samples_per_s": round(entry["ranks"] * workload.batch_size / median * 1000, 1),
    }
