"""The reduction alone: each step averages as many bytes as the gradients have, and computes nothing."""

from __future__ import annotations

from contextlib import suppress

import torch

import hvdtrain.torch as hvd
from benchmarks.torch_tasks import Task
from benchmarks.turns import Finished

if __name__ == "__main__":
    hvd.init()
    task = Task()
    gradients = [torch.ones(each.shape) for each in task.model.parameters()]
    turns = task.turns(rank=hvd.rank())
    turns.begin()
    with suppress(Finished):
        while True:
            handles = [hvd.allreduce_async_(each, name=f"gradient.{i}") for i, each in enumerate(gradients)]
            for handle in handles:
                hvd.synchronize(handle)
            turns.tick()
