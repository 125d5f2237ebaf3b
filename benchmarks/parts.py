"""Memory and time of a step of a model that two ranks share, beside torch's own: python -m benchmarks.parts.

A transformer of 100M parameters, Adam, 8 samples a step. One process has the whole model; torch's pipelining and
FSDP2 run over Gloo; a Grid runs the same over Horovod, with the Trainer. Each training is two jobs, in turns: one for
the time, and one for the memory, in which the allocator returns what is freed (MALLOC_MMAP_THRESHOLD_). A rank's memory
is its largest resident size in the steps, less the size before the model was made. Of a pipeline the
table has the share of a step in which a stage waits, 1 - T1 / (S T), where T1 is the time of one process that computes
the same micro-batches, and what (S - 1) / (M + S - 1) predicts for M micro-batches: the rest is what messages, unequal
stages and shared caches cost.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

from benchmarks.memory import print_facts, reset_peak, resident, run_job

STEPS, SKIPPED = 8, 3
WIDTH, LAYERS, BATCH = 768, 14, 8
MICRO_BATCHES = (2, 4, 8)
IN_MICRO_BATCHES = ("one process", "torch pipelining", "Grid(stages=2)")
PIPELINES = [f"{kind}, M={count}" for count in MICRO_BATCHES for kind in IN_MICRO_BATCHES]
KINDS = ["one process", "FSDP2", "Grid(shard=2)", *PIPELINES]


def make_model() -> Any:
    """Return the model's layers, in a Sequential."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    heads, inner = WIDTH // 64, 4 * WIDTH
    make = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    blocks = [nn.TransformerEncoderLayer(WIDTH, heads, inner, **make) for _ in range(LAYERS)]
    return nn.Sequential(nn.Linear(64, WIDTH), *blocks, nn.Linear(WIDTH, 64))


def data(length: int) -> tuple[Any, Any]:
    """Return inputs and targets of all steps, in sequences of so many tokens."""
    import torch

    shape = (BATCH * STEPS, length, 64)
    return torch.randn(shape), torch.randn(shape)


def train_ours(kind: str, length: int) -> list[float]:
    """Train with the Trainer; return the times at which steps ended."""
    import torch

    import hvdtrain
    import hvdtrain.torch
    from hvdtrain.callbacks import Callback

    class Clock(Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, trainer: Any, step: int) -> None:
            self.ends.append(time.perf_counter())

    model, ranks = make_model(), 1
    if "stages" in kind:
        model = hvdtrain.torch.Grid(stages=2).pipeline(model, micro_batches=_count(kind))
    elif "shard" in kind:
        model, ranks = _shard(model, hvdtrain.torch.Grid(shard=2).mesh("shard")), 2
    gc.collect()
    reset_peak()
    optimizer, clock = torch.optim.Adam(model.parameters()), Clock()
    rows = BATCH // _count(kind) if kind.startswith("one process, M") else None
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.MSELoss(), micro_batch=rows)
    sync = hvdtrain.callbacks.SyncCheck(0)  # there is nothing to compare
    callbacks = [clock, sync]
    trainer.fit(data(length), batch_size=BATCH // ranks, progress=False, run_dir=None, callbacks=callbacks)
    return clock.ends


def train_torchs(kind: str, length: int) -> list[float]:
    """Train by torch's own means; return the times at which steps ended."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn.functional import mse_loss

    rank, model = dist.get_rank(), make_model()
    (x, y), mine = data(length), slice(None)
    if kind == "FSDP2":
        model, mine = _shard(model, None), slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
    else:
        half = len(model) // 2
        model = model[half * rank : half * (rank + 1)]
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, _count(kind), loss_fn=mse_loss)
    gc.collect()
    reset_peak()
    optimizer, ends = torch.optim.Adam(model.parameters()), []
    for inputs, targets in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimizer.zero_grad()
        if kind == "FSDP2":
            mse_loss(model(inputs[mine]), targets[mine]).backward()
        elif rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets)
        optimizer.step()
        ends.append(time.perf_counter())
    return ends


def _count(kind: str) -> int:
    return int(kind.partition("M=")[2])


def _alone(kind: str) -> str:
    """Return the kind in which one process computes the same micro-batches."""
    return f"one process, M={_count(kind)}" if "M=" in kind else "one process"


def _shard(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(kind: str, length: int) -> None:
    """Train as one rank of a job, and print its facts."""
    import torch

    torch.set_num_threads(1)
    is_ours = kind.startswith(("Grid", "one process"))
    if is_ours:
        import hvdtrain

        hvdtrain.init()
    else:
        torch.distributed.init_process_group("gloo")
    import torch.distributed.fsdp
    import torch.distributed.pipelining  # before the size is taken

    before = resident("VmRSS")
    ends = (train_ours if is_ours else train_torchs)(kind, length)
    print_facts(ends[SKIPPED:], before)


def measure(kind: str, length: int) -> dict[str, float]:
    """Return the facts of two jobs: of the largest rank of one, and of the slowest of the other."""
    words = ["benchmarks.parts", "--train", kind, "--length", str(length)]
    size, launcher = 2, "horovodrun" if "Grid" in kind else "torchrun"
    if kind.startswith("one process"):
        size, launcher = 1, ""
    returns = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
    mib = run_job(words, size, launcher=launcher, **returns)["mib"]
    return {"mib": mib, "ms": run_job(words, size, launcher=launcher)["ms"]}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", default=KINDS, choices=KINDS, help="which, by name [all]")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each kind, in turns [3]")
    parser.add_argument("--length", type=int, default=16, help="tokens of a sequence, of which a step has 8 [16]")
    parser.add_argument("--train", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.length)
        return
    kinds = list(dict.fromkeys(["one process", *(_alone(kind) for kind in options.kind), *options.kind]))
    runs = [{kind: measure(kind, options.length) for kind in kinds} for _ in range(options.rounds)]
    middle = {
        kind: {name: statistics.median(run[kind][name] for run in runs) for name in ("mib", "ms")} for kind in kinds
    }
    alone = middle["one process"]
    print("| | MiB a rank | / one process | ms a step | waits | predicted |\n|---|---|---|---|---|---|")
    for kind, each in middle.items():
        waits, predicted = "", ""
        if kind != _alone(kind) and "M=" in kind:
            waits = f"{1 - middle[_alone(kind)]['ms'] / (2 * each['ms']):.2f}"
            predicted = f"{1 / (_count(kind) + 1):.2f}"
        ratio = each["mib"] / alone["mib"]
        print(f"| {kind} | {each['mib']:.0f} | {ratio:.2f} | {each['ms']:.0f} | {waits} | {predicted} |", flush=True)


if __name__ == "__main__":
    main()
