"""A plain PyTorch loop on a GPU, in bf16."""

from __future__ import annotations

from contextlib import suppress

import torch

from benchmarks import workloads
from benchmarks.gpu_tasks import GpuTask
from benchmarks.turns import Finished

if __name__ == "__main__":
    task = GpuTask()
    model = task.model.to(task.device)
    optimizer = task.optimizer()
    turns = task.turns(rank=0)
    turns.begin()
    with suppress(Finished):
        for each in workloads.batches(len(task.inputs), batch_size=task.batch_size, rank=0, size=1):
            chosen = torch.from_numpy(each)
            inputs, targets = task.inputs[chosen].to(task.device), task.targets[chosen].to(task.device)
            optimizer.zero_grad()
            with torch.autocast(task.device.type, dtype=torch.bfloat16):
                loss = task.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            turns.tick()
