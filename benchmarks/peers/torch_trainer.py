"""hvdtrain's Trainer on a PyTorch model. BENCH_SYNC=LocalSGD:8 is a strategy and its `every`."""

from __future__ import annotations

import os

import hvdtrain
from benchmarks.torch_tasks import Task
from benchmarks.trainer_turns import fit
from benchmarks.workloads import SEED

if __name__ == "__main__":
    hvdtrain.init("torch")
    task = Task()
    strategy, _, every = os.environ.get("BENCH_SYNC", "").partition(":")
    sync = getattr(hvdtrain, strategy)(**({"every": int(every)} if every else {})) if strategy else None
    trainer = hvdtrain.Trainer(task.model, optimizer=task.optimizer(), loss=task.loss, seed=SEED, sync=sync)
    fit(trainer, task, batch_size=task.workload.batch_size)
