"""A custom loop, made distributed by two lines: hvdtrain.init and hvdtrain.prepare.

horovodrun -np 2 python linear_regression.py
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdtrain

# y = 3 x0 - 2 x1 + 0.5, without noise: training must find these coefficients.
WEIGHTS, BIAS = torch.tensor([[3.0, -2.0]]), 0.5


def main() -> None:
    """Fit the line and print its coefficients."""
    world = hvdtrain.init(seed=0)
    torch.manual_seed(0)
    x = torch.randn(1001, 2)  # not divisible by the number of ranks: a short batch is weighted by its samples
    y = x @ WEIGHTS.T + BIAS

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model, optimizer, loader = hvdtrain.prepare(model, optimizer, loader)

    for _ in range(10):
        for inputs, targets in loader:  # this rank's shard, on its device
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    if world.is_root:
        w0, w1 = model.weight[0].tolist()
        print(f"ranks {world.size}  y = {w0:.4f} x0 + {w1:.4f} x1 + {model.bias.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
