"""hvdtrain as a drop-in, a GPU a rank."""

from __future__ import annotations

import torch

import hvdtrain.torch as hvd
from benchmarks.gpu_tasks import GpuTask, loop

if __name__ == "__main__":
    hvd.init()
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    task = GpuTask(hvd.rank(), hvd.local_rank())
    optimizer = task.optimizer()
    hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=task.model.named_parameters())
    if not optimizer._hvd_reducer.is_distributed:
        raise SystemExit("This peer is to reduce: it needs HVDTRAIN_REDUCE_ALONE=1.")
    loop(task, optimizer)
