"""hvdtrain as a drop-in: the plain Horovod script with one import changed. BENCH_COMPRESSION: its compression."""

from __future__ import annotations

import os

import hvdtrain.torch as hvd
from benchmarks.torch_tasks import Task, loop

if __name__ == "__main__":
    hvd.init()
    task = Task()
    optimizer = task.optimizer()
    hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=task.model.named_parameters(),
        compression=os.environ.get("BENCH_COMPRESSION", "none"),
    )
    loop(task, optimizer, rank=hvd.rank(), size=hvd.size())
