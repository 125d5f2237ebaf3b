"""Checks `hvdtrain plan` on this machine: forecasts two ranks from one rank's step and the link, and measures them.

    python -m benchmarks.plan_check --workload mlp,convnet

Two ranks of one host share its memory and caches, which a network's hosts do not. So T_comp is measured with the same
script at np=1 in two independent processes at once, which exchange nothing: what sharing costs is in it, and so is what
hvdtrain.init does for a process. What is left for the forecast is communication alone. The link is an allreduce of a
few bytes (what starting one takes) and one as large as a bucket of the model's gradients (bandwidth), over the same
ranks, with no training beside it. Overlap is 0: the cores that reduce are the ones that compute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import asked, catalog, facts, report, steps
from benchmarks.groups import Group, GroupError
from benchmarks.workloads import WORKLOADS, Workload
from hvdtrain.tools.plan.model import Cluster, Step, forecast

RANKS = 2
TOLERANCE = 0.15
_WORKLOADS = [name for name, each in WORKLOADS.items() if each.framework == "torch"]
_PEERS = {peer.name: peer for peer in catalog.TORCH}
_LINK = replace(_PEERS["hvdtrain"], name="link", script="link")
# The ranks' own script without a launcher: np=1, in one process and in two at once.
_SINGLE = replace(_PEERS["single"], script="hvdtrain", needs=("horovod",))
_ALONE = replace(_PEERS["alone"], script="hvdtrain", needs=("horovod",))


def measure_link(workload: Workload) -> dict[str, float]:
    """Return the gradients' bytes, the seconds of a tiny allreduce and the bytes a second of a large one."""
    group = Group(_LINK, workload, ranks=RANKS, data_ranks=RANKS)
    try:
        answers = [hello["result"] for hello in group.connect()]
    finally:
        group.close()
    return {name: statistics.fmean(answer[name] for answer in answers) for name in answers[0]}


def check(workload: Workload, plan: steps.Plan) -> dict[str, Any]:
    """Measure and forecast one workload. Raises GroupError where something does not run."""
    before = measure_link(workload)
    peers = steps.measure(workload, [_SINGLE, _ALONE, _PEERS["hvdtrain"]], plan, say=print)["peers"]
    after = measure_link(workload)
    for name, entry in peers.items():
        if entry["status"] != "ok":
            raise GroupError(f"{workload.name}/{name}: {entry['why']}")
    link = {name: (before[name] + after[name]) / 2 for name in before}
    single_s, alone_s, measured_s = (peers[name]["step_ms"] / 1000 for name in ("single", "alone", "hvdtrain"))
    step = Step(compute_s=alone_s, gradient_bytes=link["gradient_bytes"], samples=workload.batch_size)
    cluster = Cluster(
        ranks_per_host=RANKS,
        intra_bytes_per_s=link["bytes_per_s"],
        intra_latency_s=0.0,  # it is in the overhead, which was measured over the same ranks
        overhead_s=link["overhead_s"],
        overlap=0.0,
    )
    found = forecast(step, cluster, RANKS)
    return {
        "single_s": single_s,
        "compute_s": alone_s,
        "sync_s": found.sync_s,
        "forecast_s": found.step_s,
        "measured_s": measured_s,
        "error": found.step_s / measured_s - 1,
        **link,
    }


def as_rows(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what results/plan_check.json holds."""
    rows = [
        [
            name,
            *(round(1000 * each[key], 2) for key in ("single_s", "compute_s")),
            round(each["bytes_per_s"] / 1e9, 2),
            *(round(1000 * each[key], 2) for key in ("overhead_s", "sync_s", "forecast_s", "measured_s")),
            f"{each['error']:+.1%}",
        ]
        for name, each in results.items()
    ]
    columns = ["one process", "T_comp: two at once", "link GB/s", "start", "T_sync", "forecast", "measured", "error"]
    return {
        "kind": "rows",
        "title": f"hvdtrain plan against {RANKS} measured ranks (ms; must be within {TOLERANCE:.0%})",
        "columns": ["workload", *columns],
        "rows": rows,
        "checks": results,
        **facts.collect(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Check each workload, show and write the result; 1 where a forecast misses by more than the tolerance."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_check", description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="mlp,convnet", help="names or patterns of PyTorch workloads, by commas")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind of process")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a turn")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the result")
    options = parser.parse_args(arguments)
    plan = steps.Plan(ranks=RANKS, rounds=options.rounds, launches=1, seconds=options.seconds)
    try:
        names = asked.choose("PyTorch workload", options.workload.split(","), _WORKLOADS)
        asked.require_positive("--rounds", options.rounds)
        asked.require_positive("--seconds", options.seconds)
        asked.keep_to_cores(RANKS)
        results = {name: check(WORKLOADS[name], plan) for name in names}
    except (asked.BadInputError, GroupError) as error:
        print(f"plan_check: {error}", file=sys.stderr)
        return 1
    document = as_rows(results)
    report.save(options.out, "plan_check", document)
    report.show({"plan_check": document}, report.console())
    return 1 if any(abs(each["error"]) > TOLERANCE for each in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
