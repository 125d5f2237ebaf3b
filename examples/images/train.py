"""A ResNet on images: augmentation, loader workers, warmup and cosine, checkpoints, mixed precision.

    python train.py                       # one process
    horovodrun -np 2 python train.py      # the same numbers
    hvdtrain run -np 2 train.py           # also starts again when a process dies; the same command resumes
    hvdtrain report                       # a page of the newest run

The images are scikit-learn's handwritten digits, 8 x 8, which need no download. For your own, change `load` and
`Images`, and replace `resnet` by a model such as `torchvision.models.resnet18()`.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, Dataset

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint, Schedule
from hvdtrain.torch import convert_sync_batchnorm


class Images(Dataset):
    """Images with labels; with `augment`, each is shifted and gets noise, in another way in each epoch."""

    def __init__(self, x: np.ndarray, y: np.ndarray, *, augment: bool) -> None:
        self.x, self.y, self.augment = x, y, augment
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # loader workers are other processes

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return an image, (1, 8, 8), and its label."""
        image = self.x[index]
        if self.augment:
            # Drawn from epoch and index alone: any number of ranks and workers makes the same images.
            random = np.random.default_rng([int(self.epoch), index])
            image = np.roll(image, random.integers(-1, 2, size=2), axis=(0, 1))
            image = image + random.normal(0, 0.1, image.shape)
        return torch.as_tensor(image, dtype=torch.get_default_dtype())[None], int(self.y[index])


class NextEpoch(Callback):
    """Tell the dataset which epoch it is."""

    def __init__(self, data: Images) -> None:
        self.data = data

    def on_epoch_begin(self, trainer: hvdtrain.Trainer, epoch: int) -> None:
        """Set the epoch, before workers read the first sample of it."""
        self.data.epoch.fill_(epoch)


def load() -> tuple[Images, Images]:
    """Return the data to train and to test; every rank gets all of it, and the Trainer shards it."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))  # scikit-learn sorts them by writer
    x, y = digits.images[order] / 8 - 1, digits.target[order]
    return Images(x[:-360], y[:-360], augment=True), Images(x[-360:], y[-360:], augment=False)


class Block(nn.Module):
    """Two convolutions, and a short cut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short_cut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, outputs, side / stride, side / stride)."""
        return nn.functional.relu(self.body(x) + self.short_cut(x))


def resnet() -> nn.Module:
    """Return a small ResNet: images (batch, 1, 8, 8) to logits (batch, 10)."""
    widths = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
    stem = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*stem, *(Block(*each) for each in widths), *head)


def main() -> None:
    """Train, resume if there is a checkpoint, and test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4, help="in all, with those before a checkpoint; %(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="images a step, over all ranks; %(default)s")
    parser.add_argument("--lr", type=float, default=0.05, help="for that batch size; %(default)s")
    parser.add_argument("--workers", type=int, default=1, help="loader workers of each rank; %(default)s")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="%(default)s")
    parser.add_argument("--checkpoints", default="checkpoints/images", metavar="DIR", help="%(default)s")
    args = parser.parse_args()

    world = hvdtrain.init(seed=0)  # before the model is made: picks this rank's GPU
    torch.manual_seed(0)
    train, test = load()
    # The batch of a step does not depend on the number of ranks, and so neither does the result.
    local = {"batch_size": args.batch_size // world.size, "num_workers": args.workers}
    model = convert_sync_batchnorm(resnet())  # BatchNorm over the batches of all ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def warm_up_and_cosine(steps: int) -> SequentialLR:
        warm_up = max(1, steps // 10)
        ramp = LinearLR(optimizer, start_factor=0.1, total_iters=warm_up)
        return SequentialLR(optimizer, [ramp, CosineAnnealingLR(optimizer, steps - warm_up)], milestones=[warm_up])

    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=loss, metrics=["accuracy"], precision=args.precision)
    callbacks = [
        NextEpoch(train),
        Schedule(warm_up_and_cosine, every="step"),
        Checkpoint(args.checkpoints, keep_last=2, best="val_accuracy"),
    ]
    loader, test_loader = DataLoader(train, shuffle=True, **local), DataLoader(test, **local)
    trainer.fit(loader, validation=test_loader, epochs=args.epochs, callbacks=callbacks)
    result = trainer.evaluate(test_loader)  # on every rank: all get the result over all images
    if world.is_root:  # only output here, never a collective
        print(f"ranks {world.size}: loss {result['loss']:.4f}, accuracy {result['accuracy']:.4f}", flush=True)


if __name__ == "__main__":
    main()
