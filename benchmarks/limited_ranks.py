"""Jobs of four ranks that train an MLP in turns, each rank with a part of a core; as root, on Linux.

`benchmarks.slow_rank` and `benchmarks.backup_workers` use it. Each rank has a control group with a part of a
core, so that all four have enough on two cores. Ranks exchange over Gloo, whose waits take no processor time: Open
MPI's would use up a waiting rank's part of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RANKS = 4
_GROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 10_000


def parser(module: str, description: str | None, jobs: Collection[str], *, batch_size: int) -> argparse.ArgumentParser:
    """Return the options of such a benchmark; with --job, one that a launcher has started trains that job."""
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--seconds", type=float, default=30, help="of training a job")
    made.add_argument("--batch-size", type=int, default=batch_size, help="per rank")
    made.add_argument("--cores", type=float, default=0.4, help="of a rank")
    made.add_argument("--job", choices=jobs, help=argparse.SUPPRESS)
    made.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return made


def take_turns(
    module: str, jobs: Collection[str], *, rounds: int, extra: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run each job once a round; yield its name and what rank 0 wrote to the file that --result names.

    Args:
        extra: arguments of a job beside this command's own. They are read before each job: later ones may have more.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        for turn in range(rounds):
            for name in jobs:
                command = ["horovodrun", "--gloo", "-np", str(RANKS), sys.executable, "-m", module, *sys.argv[1:]]
                command += ["--job", name, "--result", str(result), *extra]
                one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, env=one_thread, capture_output=True, text=True)
                if done.returncode != 0:
                    sys.exit(f"{name}: exit status {done.returncode}\n{done.stderr[-2000:]}")
                taken = json.loads(result.read_text())
                figures = ", ".join(f"{key} {value}" for key, value in taken.items())
                print(f"round {turn + 1}, {name}: {figures}", flush=True)
                yield name, taken


def print_medians(found: Mapping[str, Sequence[float]], *, unit: str) -> None:
    """Print each job's median, and its ratio to the first job's."""
    base = statistics.median(next(iter(found.values())))
    for name, values in found.items():
        median = statistics.median(values)
        print(f"{name:{max(map(len, found))}} {median:8.1f} {unit}, {median / base:5.2f} x")


def limit(rank: int, cores: float) -> None:
    """Put this process into a control group of so many cores."""
    first_version = (_GROUPS / "cpu").is_dir()
    folder = (_GROUPS / "cpu" if first_version else _GROUPS) / f"hvdtrain-benchmark-rank-{rank}"
    folder.mkdir(exist_ok=True)
    quota = int(cores * _PERIOD_US)
    if first_version:
        (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(quota))
    else:
        (folder / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def make_trainer(num_samples: int, inputs: int, **options: Any) -> tuple[Any, tuple[Any, Any]]:
    """Return a Trainer of an MLP with two hidden layers, and random samples of 10 classes; equal on all ranks."""
    import torch
    from torch import nn

    import hvdtrain

    torch.manual_seed(0)
    x, y = torch.randn(num_samples, inputs), torch.randint(0, 10, (num_samples,))
    net = nn.Sequential(nn.Linear(inputs, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    return hvdtrain.Trainer(net, optimizer=optimizer, loss=nn.CrossEntropyLoss(), **options), (x, y)
