"""hvdtrain's Trainer on a PyTorch model."""

from __future__ import annotations

import hvdtrain
from benchmarks.torch_tasks import Task
from benchmarks.trainer_turns import exchange, fit
from benchmarks.workloads import SEED

if __name__ == "__main__":
    hvdtrain.init("torch")
    task = Task()
    trainer = hvdtrain.Trainer(task.model, optimizer=task.optimizer(), loss=task.loss, seed=SEED, **exchange())
    fit(trainer, task, batch_size=task.workload.batch_size)
