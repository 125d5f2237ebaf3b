"""hvdtrain's Trainer on a GPU, in bf16."""

from __future__ import annotations

from contextlib import suppress

import hvdtrain
from benchmarks.gpu_tasks import GpuTask
from benchmarks.trainer_ticks import Ticks
from benchmarks.turns import Finished
from benchmarks.workloads import SEED

if __name__ == "__main__":
    world = hvdtrain.init("torch")
    task = GpuTask()
    trainer = hvdtrain.Trainer(task.model, optimizer=task.optimizer(), loss=task.loss, precision="bf16", seed=SEED)
    with suppress(Finished):
        trainer.fit(
            (task.inputs, task.targets),
            epochs=1_000_000,
            batch_size=task.batch_size,
            callbacks=[Ticks(task.turns(rank=world.rank))],
            progress=False,
        )
