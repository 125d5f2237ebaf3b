"""One training of the sweep: a classifier of handwritten digits, whose result goes into a file.

python train.py --lr 0.1 --batch-size 32 --folder runs/one
horovodrun -np 2 python train.py --lr 0.1 --batch-size 32 --folder runs/one      # the same numbers
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

import hvdtrain


def main() -> None:
    """Train, resume if there is a checkpoint, and write result.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--batch-size", type=int, required=True, help="images a step, over all ranks")
    parser.add_argument("--epochs", type=int, default=5, help="in all, with those before a checkpoint; %(default)s")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints and the result")
    args = parser.parse_args()

    world = hvdtrain.init(seed=0)
    torch.manual_seed(0)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = torch.tensor(digits.data[order] / 16, dtype=torch.float32), torch.tensor(digits.target[order])
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), metrics=["accuracy"])
    trainer.fit(
        (x[:-360], y[:-360]),
        epochs=args.epochs,
        batch_size=args.batch_size // world.size,
        checkpoint_dir=str(args.folder / "checkpoints"),
        run_dir=str(args.folder),
        progress=False,
    )
    result = trainer.evaluate((x[-360:], y[-360:]))
    if world.is_root:  # only output here, never a collective
        part = args.folder / "result.json.part"
        part.write_text(json.dumps({"loss": result["loss"], "accuracy": result["accuracy"]}))
        part.replace(args.folder / "result.json")  # there whole, or not at all


if __name__ == "__main__":
    main()
