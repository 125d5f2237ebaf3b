"""torch's DistributedDataParallel over gloo, as its manual has it. With BENCH_DDP_TUNED=1: its own fast options."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.torch_tasks import Task, loop

if __name__ == "__main__":
    dist.init_process_group("gloo")
    task = Task()
    tuned = os.environ.get("BENCH_DDP_TUNED") == "1"
    model = DistributedDataParallel(task.model, gradient_as_bucket_view=tuned, static_graph=tuned)
    loop(task, task.optimizer(), rank=dist.get_rank(), size=dist.get_world_size(), model=model)
    dist.destroy_process_group()
