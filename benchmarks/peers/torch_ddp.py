"""torch's DistributedDataParallel over gloo, as its manual has it. With BENCH_DDP_TUNED=1: its own fast options.

With BENCH_COMPRESSION=fp16 its own hook sends half precision.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.torch_tasks import Task, loop

if __name__ == "__main__":
    dist.init_process_group("gloo")
    task = Task()
    tuned = os.environ.get("BENCH_DDP_TUNED") == "1"
    model = DistributedDataParallel(task.model, gradient_as_bucket_view=tuned, static_graph=tuned)
    if os.environ.get("BENCH_COMPRESSION") == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    loop(task, task.optimizer(), rank=dist.get_rank(), size=dist.get_world_size(), model=model)
    dist.destroy_process_group()
