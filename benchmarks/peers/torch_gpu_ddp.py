"""torch's DistributedDataParallel over nccl, a GPU a rank, as its manual has it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu_tasks import GpuTask, loop

if __name__ == "__main__":
    on_gpu, local_rank = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    if on_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    task = GpuTask(dist.get_rank(), local_rank)
    wrapped = DistributedDataParallel(task.model, device_ids=[local_rank] if on_gpu else None)
    loop(task, task.optimizer(), model=wrapped)
    dist.destroy_process_group()
