"""Measure with PyTorch for `hvdtrain bench`: one allreduce, and the steps of a standard model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hvdtrain.torch as hvd


def allreduce_of(num_bytes: int, *, device: str) -> Callable[[], None]:
    """Return a function that reduces a float32 tensor of `num_bytes` in place, as gradients are, and waits for it."""
    tensor = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    name = f"bench.{num_bytes}"

    def reduce() -> None:
        hvd.allreduce_(tensor, name=name, op=hvd.Average)
        if tensor.is_cuda:
            torch.cuda.synchronize()

    return reduce


def mlp(inputs: int, hidden: int, classes: int) -> dict[str, Any]:
    """Return the standard model, with optimizer and loss as `Trainer` takes them."""
    layers = [nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "loss": nn.CrossEntropyLoss()}
