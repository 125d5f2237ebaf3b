"""A training step between ranks beside one process's: what `hvdtrain build` proves Horovod with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.distributed.world import World
from hvdtrain.torch.reduction.optimizer import DistributedOptimizer


def step_difference(world: World) -> float:
    """Return the largest difference between a weight after all ranks' step, and after one process's on their data."""
    shapes = ((8, world.size, 5), (8, world.size, 3), (5, 3))
    generator = torch.Generator().manual_seed(0)
    inputs, targets, start = (
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes
    )

    def step(part: slice, wrap: Callable[[Any], Any] = lambda plain: plain) -> torch.Tensor:
        weights = torch.nn.Parameter(start.clone())
        optimizer = wrap(torch.optim.SGD([weights], lr=0.1))
        torch.nn.functional.mse_loss(inputs[:, part] @ weights, targets[:, part]).backward()
        optimizer.step()
        return weights.detach()

    ours = step(slice(world.rank, world.rank + 1), DistributedOptimizer)
    return float((ours - step(slice(None))).abs().max())
