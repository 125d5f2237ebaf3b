"""A rank of a drop-in script with Compression.bf16. It prints "ok" if each mean has the bits that it must have."""

from __future__ import annotations

import os

import torch

import hvdtrain.torch as hvd
from hvdtrain.torch.ops import submit

submit._is_on_gpu = lambda tensor: True  # for hvdtrain too, tensors on the host are on the stand-in's device
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Tanh(), torch.nn.Linear(200, 7))
parameters = list(model.parameters())
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(parameters, lr=0.1), model.named_parameters(), compression=hvd.Compression.bf16
)
os.environ["HVDTRAIN_STANDIN_OVERLAPS"] = "1"  # from now on, until the end of the steps
for step in range(4):
    batches = torch.randn(hvd.size(), 8, 300, generator=torch.Generator().manual_seed(step))
    of_ranks = [torch.autograd.grad(model(batch).square().mean(), parameters) for batch in batches]
    optimizer.zero_grad()
    model(batches[hvd.rank()]).square().mean().backward()
    optimizer.synchronize()
    for index, parameter in enumerate(parameters):
        sent = torch.stack([gradients[index].bfloat16() for gradients in of_ranks])
        mean = (sent.float().sum(0) / hvd.size()).bfloat16().float()
        assert torch.equal(parameter.grad, mean), f"rank {hvd.rank()}, step {step}, parameter {index}"
    with optimizer.skip_synchronize():
        optimizer.step()
os.environ["HVDTRAIN_STANDIN_OVERLAPS"] = "0"
hvd.shutdown()
print("ok")
