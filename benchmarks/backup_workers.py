"""What random stalls cost, and what is left of it with `Trainer(cutoff=0.75)`; as root, on Linux.

    python -m benchmarks.backup_workers

Four ranks train an MLP, with eight batches a step. Each has a control group with a part of a core, as in
`benchmarks.slow_rank`. In 2 % of its batches each rank, or the last one alone, sleeps for as long as five steps take
without stalls. Jobs take turns: without stalls, and with them, in synchronous steps and with the cutoff. Samples a
second, over all ranks, are those of the whole run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.slow_rank import limit

ACCUMULATE = 8
STALLED_STEPS = 5
JOBS: dict[str, dict[str, Any]] = {
    "no stalls": {"stalled": "none", "cutoff": None},
    "no stalls, cutoff=0.75": {"stalled": "none", "cutoff": 0.75},
    "the last rank stalls": {"stalled": "last", "cutoff": None},
    "the last rank stalls, cutoff=0.75": {"stalled": "last", "cutoff": 0.75},
    "every rank stalls": {"stalled": "every", "cutoff": None},
    "every rank stalls, cutoff=0.75": {"stalled": "every", "cutoff": 0.75},
}


def train(options: argparse.Namespace) -> None:
    """Train on this rank, and write down the speed."""
    import torch

    import hvdtrain

    world = hvdtrain.init("torch", seed=0)
    job = JOBS[options.job]
    limit(world.rank, options.cores)
    torch.manual_seed(0)
    x, y = torch.randn(200_000, 256), torch.randint(0, 10, (200_000,))
    net = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    )
    drawn = random.Random(world.rank)
    stalls = job["stalled"] == "every" or (job["stalled"] == "last" and world.rank == world.size - 1)

    def stall(*_: object) -> None:
        if drawn.random() < options.share:
            time.sleep(options.stall_s)

    if stalls:
        net.register_forward_pre_hook(stall)
    trainer = hvdtrain.Trainer(
        net, optimizer=torch.optim.SGD(net.parameters(), lr=0.01), loss=torch.nn.CrossEntropyLoss(),
        accumulate=ACCUMULATE, cutoff=job["cutoff"],
    )  # fmt: skip
    history = trainer.fit(
        (x, y), epochs=100, seconds=options.seconds, batch_size=options.batch_size, progress=False, run_dir=None
    )
    if world.is_root:
        speed = statistics.fmean(history["samples_per_s"])
        step_s = sum(history["seconds"]) / trainer.global_step
        result = {"samples_per_s": speed, "step_s": step_s, "cut": len(history.cutoffs), "steps": trainer.global_step}
        Path(options.result).write_text(json.dumps(result))


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Let the jobs take turns; return samples a second."""
    found: dict[str, list[float]] = {name: [] for name in JOBS}
    stall_s = options.stall_s
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        for turn in range(options.rounds):
            for name in found:
                command = ["horovodrun", "--gloo", "-np", "4", sys.executable, "-m", "benchmarks.backup_workers"]
                command += [*sys.argv[1:], "--job", name, "--result", str(result), "--stall-s", str(stall_s)]
                one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, env=one_thread, capture_output=True, text=True)
                if done.returncode != 0:
                    sys.exit(f"{name}: exit status {done.returncode}\n{done.stderr[-2000:]}")
                taken = json.loads(result.read_text())
                if not stall_s:  # the first job has none
                    stall_s = STALLED_STEPS * taken["step_s"]
                    print(f"a stall takes {stall_s:.2f} s, {STALLED_STEPS} steps", flush=True)
                found[name].append(taken["samples_per_s"])
                print(f"round {turn + 1}, {name}: {taken['samples_per_s']:.0f} samples/s, {taken['steps']} steps, "
                      f"{taken['cut']} cut", flush=True)  # fmt: skip
    return found


def main() -> None:
    """Measure and print, or, started by a launcher, train."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backup_workers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30, help="of training a job")
    parser.add_argument("--batch-size", type=int, default=256, help="per rank")
    parser.add_argument("--cores", type=float, default=0.4, help="of a rank")
    parser.add_argument("--share", type=float, default=0.02, help="of the batches that stall")
    parser.add_argument("--stall-s", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        train(options)
        return
    found = measure(options)
    base = statistics.median(found["no stalls"])
    for name, speeds in found.items():
        print(f"{name:36} {statistics.median(speeds):8.0f} samples/s, {statistics.median(speeds) / base:5.2f} x")


if __name__ == "__main__":
    main()
