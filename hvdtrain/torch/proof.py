"""A training step between ranks beside one process's: what `hvdtrain build` proves Horovod with."""

from __future__ import annotations

import copy

import torch

from hvdtrain.distributed.world import World
from hvdtrain.torch.optimizer import DistributedOptimizer


def step_difference(world: World) -> float:
    """Return the largest difference between a weight after the ranks' step and after one process's on all their data.

    Every rank takes the step of one process too, so that each knows the difference. All ranks call it.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, world.size, 5, generator=generator)
    targets = torch.randn(8, world.size, 3, generator=generator)
    model = torch.nn.Linear(5, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    alone = copy.deepcopy(model)

    def step(of: torch.nn.Module, optimizer: torch.optim.Optimizer, part: slice) -> None:
        torch.nn.functional.mse_loss(of(inputs[:, part]), targets[:, part]).backward()
        optimizer.step()

    reduced = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    step(model, reduced, slice(world.rank, world.rank + 1))
    step(alone, torch.optim.SGD(alone.parameters(), lr=0.1), slice(None))
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)
