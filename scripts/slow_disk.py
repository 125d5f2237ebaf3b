"""Train the run whose report docs/pages/report.png shows: for a while, rank 1 waits for its disk.

    HVDTRAIN_RUN_NAME=slow-disk horovodrun -np 2 python scripts/slow_disk.py && hvdtrain report runs/slow-disk
    chromium --headless --hide-scrollbars --window-size=960,1635 --screenshot=report.png runs/slow-disk/report.html

docs/pages/report-top.png is its upper part, which the README shows.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

import hvdtrain

SLOW_EPOCHS = range(18, 24)  # in which a batch takes rank 1 so much longer
SLOW_S = 0.008


class Digits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images that are read in batches, from a disk that is slow on rank 1 in some epochs."""

    def __init__(self, x: np.ndarray, y: np.ndarray, rank: int) -> None:
        self.x, self.y, self.rank = torch.from_numpy(x), torch.from_numpy(y), rank
        self.read = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        epoch, self.read = self.read * 2 // len(self.x), self.read + len(indices)  # of two ranks
        if self.rank == 1 and epoch in SLOW_EPOCHS:
            time.sleep(SLOW_S)
        return [(self.x[index], self.y[index]) for index in indices]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def main() -> None:
    """Train a ConvNet on scikit-learn's handwritten digits."""
    world = hvdtrain.init()
    torch.manual_seed(0)
    digits = load_digits()
    x = (digits.images / 16).astype(np.float32)[:, None]
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], digits.target[order]
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(64 * 36, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), metrics=["accuracy"])
    loader = DataLoader(Digits(x[:1400], y[:1400], world.rank), batch_size=16, shuffle=True)
    trainer.fit(loader, validation=(x[1400:], y[1400:]), epochs=40)


if __name__ == "__main__":
    main()
