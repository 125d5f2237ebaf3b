"""One rank on a GPU: the Trainer in bf16 against a plain PyTorch loop, and a timeline of the exchange."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import steps
from benchmarks.catalog import Peer
from benchmarks.groups import Group
from benchmarks.stats import ratio
from benchmarks.steps import Plan
from benchmarks.workloads import Workload

# averages=False: bf16 on a GPU does not repeat bit for bit, and there is one rank.
PEERS = (
    Peer("single", "plain PyTorch loop", "gpu_plain", "python", ranks=1, averages=False),
    Peer("trainer", "hvdtrain, Trainer", "gpu_trainer", "horovodrun", needs=("horovod",), ranks=1, averages=False),
)


def devices() -> list[str]:
    """Return the names of the GPUs that torch sees; asked in a process of its own, which then lets go of them."""
    code = (
        "import json, torch; "
        "print(json.dumps([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    names: list[str] = json.loads(found.stdout) if found.returncode == 0 else []
    return names


def measure(workload: Workload, plan: Plan, folder: Path, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Return what results/gpu-NAME.json holds; the timeline is written beside it."""
    gpus = devices()
    measured = steps.measure(workload, PEERS, replace(plan, ranks=1), say=say)
    # The device is only waited for at the end of a turn, so a turn's mean is what a step takes.
    for entry in measured["peers"].values():
        if entry["status"] == "ok":
            entry["block_ms"], entry["step_ms"] = entry["block_mean_ms"], entry["mean_ms"]
            entry["samples_per_s"] = round(workload.batch_size / entry["mean_ms"] * 1000, 1)
    measured["machine"]["gpus"] = gpus
    if against := ratio(measured, "trainer", "single"):
        say(f"trainer / plain loop: {against}, at most 1.01 wanted")
    if len(gpus) > 1:
        timeline(workload, len(gpus), folder / "timelines" / f"{workload.name}.json", say=say)
    else:
        say("no timeline: overlap shows where gradients travel, which takes two GPUs")
    return measured


def timeline(workload: Workload, ranks: int, path: Path, *, say: Callable[[str], None]) -> None:
    """Write Horovod's timeline of a few steps: chrome://tracing or ui.perfetto.dev shows it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    peer = replace(PEERS[1], ranks=ranks, environment={"HOROVOD_TIMELINE": str(path.absolute())})
    group = Group(peer, workload, ranks=ranks, data_ranks=ranks)
    try:
        group.connect()
        group.turn("run", steps=20)
        group.turn("end")
    finally:
        group.close()
    say(f"timeline of {ranks} ranks: {path}")
