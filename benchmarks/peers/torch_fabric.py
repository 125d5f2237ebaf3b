"""Lightning Fabric."""

from __future__ import annotations

import os

from lightning_fabric import Fabric

from benchmarks.torch_tasks import Task, loop

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    task = Task()
    model, optimizer = fabric.setup(task.model, task.optimizer())
    loop(task, optimizer, rank=fabric.global_rank, size=fabric.world_size, model=model, backward=fabric.backward)
