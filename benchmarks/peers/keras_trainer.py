"""hvdtrain's Trainer on a Keras model."""

from __future__ import annotations

from contextlib import suppress

import hvdtrain
from benchmarks.keras_tasks import Task
from benchmarks.trainer_ticks import Ticks
from benchmarks.turns import Finished
from benchmarks.workloads import SEED

if __name__ == "__main__":
    world = hvdtrain.init("keras")
    task = Task()
    trainer = hvdtrain.Trainer(task.model, optimizer=task.optimizer(), loss=task.loss, seed=SEED)
    with suppress(Finished):
        trainer.fit(
            (task.inputs, task.targets),
            epochs=1_000_000,
            batch_size=task.workload.batch_size,
            callbacks=[Ticks(task.turns(rank=world.rank))],
            progress=False,
        )
