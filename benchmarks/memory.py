"""Peak memory and time of a step with sharded state and gradients, beside torch's own: python -m benchmarks.memory.

Each training is a job of its own, of one process a rank. A rank's memory is the largest resident size from before the
model was made to the last step, less the size before: weights, gradients, optimizer state, buckets, activations. The
table has the largest rank's. Ranks share cores, and a job's time is the median of its steps after the first ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STEPS, SKIPPED = 10, 4
TRAINER: dict[str, dict[str, Any]] = {
    "hvdtrain": {},
    "hvdtrain, optimizer": {"shard": "optimizer"},
    "hvdtrain, gradients": {"shard": "gradients"},
    "hvdtrain, gradients, blocks": {"shard": "gradients", "checkpoint_activations": "blocks"},
}
PEERS = ("DDP", "DDP, gradient_as_bucket_view", "DDP, ZeroRedundancyOptimizer", "FSDP2")
_FACTS = "facts of a rank: "


def mlp() -> tuple[Any, Any, Any]:
    """Return a perceptron of 18M parameters, with a batch."""
    import torch
    from torch import nn

    sizes = [512, 2560, 2560, 2560, 1280, 10]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])
    return model, torch.randn(64, 512), torch.randn(64, 10)


def transformer(width: int = 256, layers: int = 6, length: int = 64, batch: int = 4) -> tuple[Any, Any, Any]:
    """Return a transformer encoder, of 5M parameters by default, with a batch."""
    import torch
    from torch import nn

    block = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(64, width), body, nn.Linear(width, 64))
    return model, torch.randn(batch, length, 64), torch.randn(batch, length, 64)


def gpt() -> tuple[Any, Any, Any]:
    """Return a transformer of 100M parameters: GPT-2's width, on 16 tokens."""
    return transformer(width=768, layers=14, length=16, batch=1)


MODELS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {"mlp": mlp, "transformer": transformer, "gpt": gpt}


def resident(line: str) -> float:
    """Return this process's resident size, of this line of its status, in MiB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(float(each.split()[1]) / 1024 for each in status.splitlines() if each.startswith(line))


def reset_peak() -> None:
    """Let this process's largest resident size begin at the present one."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def train_peer(kind: str, model: Any, x: Any, y: Any) -> list[float]:
    """Train by torch's own means; return the times at which steps ended."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    if kind == "FSDP2":
        for block in model[1].layers if hasattr(model[1], "layers") else model:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view="view" in kind)
    if "Zero" in kind:
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    else:
        optimizer = torch.optim.Adam(model.parameters())
    ends = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        ends.append(time.perf_counter())
    return ends


def train_ours(kind: str, model: Any, x: Any, y: Any) -> list[float]:
    """Train with the Trainer; return the times at which steps ended."""
    import torch

    import hvdtrain
    from hvdtrain.callbacks import Callback

    class Clock(Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, trainer: Any, step: int) -> None:
            self.ends.append(time.perf_counter())

    optimizer, clock = torch.optim.Adam(model.parameters()), Clock()
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.MSELoss(), **TRAINER[kind])
    data = tuple(each.repeat(STEPS * trainer.world.size, *[1] * (each.dim() - 1)) for each in (x, y))
    trainer.fit(data, batch_size=len(x), progress=False, run_dir=None, callbacks=[clock])
    return clock.ends


def train(kind: str, model_name: str) -> None:
    """Train as one rank of a job, and print its facts."""
    import torch

    torch.set_num_threads(1)
    if kind in PEERS:
        torch.distributed.init_process_group("gloo")
    else:
        import hvdtrain

        hvdtrain.init()
    import torch.distributed.optim  # before the size is taken

    torch.manual_seed(0)
    reset_peak()
    before = resident("VmRSS")
    ends = (train_peer if kind in PEERS else train_ours)(kind, *MODELS[model_name]())
    print_facts(ends[SKIPPED:], before)


def print_facts(ends: Sequence[float], before: float) -> None:
    """Print this rank's memory, less that `before`, and the median time between the `ends` of steps, for `run_job`."""
    took = [after - first for first, after in itertools.pairwise(ends)]
    print(_FACTS + json.dumps({"mib": resident("VmHWM") - before, "ms": 1000 * statistics.median(took)}), flush=True)


def measure(kind: str, model: str, size: int) -> dict[str, float]:
    """Return the facts of one job: those of its largest and of its slowest rank."""
    words = ["benchmarks.memory", "--train", kind, "--model", model]
    return run_job(words, size, launcher="torchrun" if kind in PEERS else "horovodrun")


def run_job(words: Sequence[str], size: int, *, launcher: str, **variables: str) -> dict[str, float]:
    """Return the facts that ranks print as `print_facts` does: those of the largest and of the slowest rank.

    Args:
        words: a module and its arguments.
        size: ranks.
        launcher: "torchrun", "horovodrun", or "" for one process without any.
        variables: of the environment.
    """
    command = [sys.executable, "-m", *words]
    start = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", "--no-python"],
        "horovodrun": [str(Path(sys.executable).with_name("horovodrun")), "-np", str(size)],
        "": [],
    }[launcher]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    run = subprocess.run([*start, *command], env=environment, capture_output=True, text=True, timeout=1200)
    facts = [json.loads(found) for found in re.findall(_FACTS + r"(\{.*?\})", run.stdout)]  # two may share a line
    if len(facts) != size:
        raise RuntimeError(f"{' '.join(words)}, {size} ranks: {run.stdout[-2000:]}{run.stderr[-2000:]}")
    return {name: max(each[name] for each in facts) for name in ("mib", "ms")}


def main() -> None:
    """Print a table for each model and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--np", nargs="+", type=int, default=[2, 4], help="numbers of ranks [2 4]")
    parser.add_argument("--kind", nargs="+", default=[*PEERS, *TRAINER], help="which, by name [all]")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each kind, in turns [3]")
    parser.add_argument("--train", choices=[*PEERS, *TRAINER], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.model[0])
        return
    for model in options.model:
        for size in options.np:
            kinds = [each for each in options.kind if model != "mlp" or "blocks" not in each]
            runs = [{kind: measure(kind, model, size) for kind in kinds} for _ in range(options.rounds)]
            middle = {
                kind: {name: statistics.median(run[kind][name] for run in runs) for name in ("mib", "ms")}
                for kind in kinds
            }
            first = middle[kinds[0]]
            print(f"\n{model}, {size} ranks\n\n| | MiB a rank | / {kinds[0]} | ms a step | / {kinds[0]} |")
            print("|---|---|---|---|---|")
            for kind, each in middle.items():
                memory, duration = (f"{each[name]:.0f} | {each[name] / first[name]:.2f}" for name in ("mib", "ms"))
                print(f"| {kind} | {memory} | {duration} |", flush=True)


if __name__ == "__main__":
    main()
