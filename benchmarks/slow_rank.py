"""What one slow rank costs, and what is left of it with `fit(balance="speed")`; as root, on Linux.

    python -m benchmarks.slow_rank

Four ranks train an MLP. Each has a control group with a part of a core, so that all four have enough on two cores; the
last rank's may be halved. Three jobs take turns: four equal ranks; the last one at half speed; and the same with
balance="speed". With equal parts the second takes twice the first's time; the best division takes 8/7 of it. Ranks
exchange over Gloo, whose waits take no processor time: Open MPI's would use up a waiting rank's part of a core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hvdtrain.callbacks import Callback

JOBS = {
    "equal ranks": {"slow": False, "balance": None},
    "the last at half speed": {"slow": True, "balance": None},
    'the last at half speed, balance="speed"': {"slow": True, "balance": "speed"},
}
_GROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 10_000


def limit(rank: int, cores: float) -> None:
    """Put this process into a control group of so many cores."""
    first_version = (_GROUPS / "cpu").is_dir()
    folder = (_GROUPS / "cpu" if first_version else _GROUPS) / f"hvdtrain-slow-rank-{rank}"
    folder.mkdir(exist_ok=True)
    quota = int(cores * _PERIOD_US)
    if first_version:
        (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(quota))
    else:
        (folder / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
    (folder / "cgroup.procs").write_text(str(os.getpid()))


class Times(Callback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, trainer: Any, step: int) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())


def train(options: argparse.Namespace) -> None:
    """Train on this rank, and write down the step time."""
    import torch

    import hvdtrain

    world = hvdtrain.init("torch", seed=0)
    job = JOBS[options.job]
    limit(world.rank, options.cores * (0.5 if job["slow"] and world.rank == world.size - 1 else 1.0))
    torch.manual_seed(0)
    x, y = torch.randn(20_000, 512), torch.randint(0, 10, (20_000,))
    width = 512
    net = torch.nn.Sequential(
        torch.nn.Linear(512, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )  # fmt: skip
    times = Times()
    trainer = hvdtrain.Trainer(
        net, optimizer=torch.optim.SGD(net.parameters(), lr=0.01), loss=torch.nn.CrossEntropyLoss()
    )
    trainer.fit(
        (x, y), seconds=options.seconds, batch_size=options.batch_size, balance=job["balance"], callbacks=[times],
        progress=False, run_dir=None,
    )  # fmt: skip
    if world.is_root:
        ends = times.ends[-len(times.ends) // 3 :]
        taken = [b - a for a, b in itertools.pairwise(ends)]
        shares = trainer._loop.state.shares
        result = {"step_ms": 1000 * statistics.fmean(taken), "steps": len(times.ends), "shares": shares}
        Path(options.result).write_text(json.dumps(result))


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Let the jobs take turns; return their step times in ms."""
    found: dict[str, list[float]] = {name: [] for name in JOBS}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        for turn in range(options.rounds):
            for name in found:
                command = ["horovodrun", "--gloo", "-np", "4", sys.executable, "-m", "benchmarks.slow_rank"]
                command += [*sys.argv[1:], "--job", name, "--result", str(result)]
                one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, env=one_thread, capture_output=True, text=True)
                if done.returncode != 0:
                    sys.exit(f"{name}: exit status {done.returncode}\n{done.stderr[-2000:]}")
                taken = json.loads(result.read_text())
                found[name].append(taken["step_ms"])
                print(f"round {turn + 1}, {name}: {taken['step_ms']:.1f} ms, {taken['steps']} steps, "
                      f"shares {taken['shares'] or 'equal'}", flush=True)  # fmt: skip
    return found


def main() -> None:
    """Measure and print, or, started by a launcher, train."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_rank", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30, help="of training a job; the last third counts")
    parser.add_argument("--batch-size", type=int, default=2048, help="per rank")
    parser.add_argument("--cores", type=float, default=0.4, help="of a rank")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        train(options)
        return
    found = measure(options)
    base = statistics.median(found["equal ranks"])
    for name, times in found.items():
        print(f"{name:42} {statistics.median(times):8.1f} ms a step, {statistics.median(times) / base:5.2f} x")


if __name__ == "__main__":
    main()
