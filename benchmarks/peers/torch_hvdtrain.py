"""hvdtrain as a drop-in: the plain Horovod script with one import changed. BENCH_COMPRESSION=fp16: half precision."""

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
    compression = hvd.Compression.fp16 if os.environ.get("BENCH_COMPRESSION") == "fp16" else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=task.model.named_parameters(), compression=compression
    )
    loop(task, optimizer, rank=hvd.rank(), size=hvd.size())
