"""hvdtrain's Trainer on a GPU, in bf16."""

from __future__ import annotations

import hvdtrain
from benchmarks.gpu_tasks import GpuTask
from benchmarks.trainer_turns import fit
from benchmarks.workloads import SEED

if __name__ == "__main__":
    hvdtrain.init("torch")
    task = GpuTask()
    trainer = hvdtrain.Trainer(task.model, optimizer=task.optimizer(), loss=task.loss, precision="bf16", seed=SEED)
    if not trainer._adapter._reduced:
        raise SystemExit("This peer is to reduce: it needs HVDTRAIN_REDUCE_ALONE=1.")
    fit(trainer, task, batch_size=task.batch_size)
