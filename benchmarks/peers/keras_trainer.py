"""hvdtrain's Trainer on a Keras model."""

from __future__ import annotations

import hvdtrain
from benchmarks.keras_tasks import Task
from benchmarks.trainer_turns import exchange, fit
from benchmarks.workloads import SEED

if __name__ == "__main__":
    hvdtrain.init("keras")
    task = Task()
    trainer = hvdtrain.Trainer(task.model, optimizer=task.optimizer(), loss=task.loss, seed=SEED, **exchange())
    fit(trainer, task, batch_size=task.workload.batch_size)
