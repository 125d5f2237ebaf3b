"""torch's DistributedDataParallel over nccl on one GPU, as its manual has it, in bf16."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu_tasks import GpuTask, loop

if __name__ == "__main__":
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    task = GpuTask()
    loop(task, task.optimizer(), model=DistributedDataParallel(task.model, device_ids=[0] if on_gpu else None))
    dist.destroy_process_group()
