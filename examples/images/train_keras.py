"""A ResNet on images in Keras: augmentation, warmup and cosine, checkpoints.

    python train_keras.py                                     # one process
    KERAS_BACKEND=jax horovodrun -np 2 python train_keras.py  # the same numbers

KERAS_BACKEND is tensorflow, torch or jax. For your own images, change `load` and `Images`, and replace `resnet` by
a model such as `keras.applications.ResNet50`. (Its BatchNorm normalizes each rank's batch by itself.)
"""

from __future__ import annotations

import argparse
import math

import hvdtrain  # isort: skip  before Keras: hides TensorFlow's start-up notes
import keras
import numpy as np
from sklearn.datasets import load_digits

from hvdtrain.callbacks import Callback, Checkpoint


class Images:
    """Images with labels; with `augment`, each is shifted and gets noise, in another way in each epoch."""

    def __init__(self, x: np.ndarray, y: np.ndarray, *, augment: bool) -> None:
        self.x, self.y, self.augment = x, y, augment
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """Return an image, (8, 8, 1), and its label."""
        image = self.x[index]
        if self.augment:
            # Drawn from epoch and index alone: any number of ranks makes the same images.
            random = np.random.default_rng([self.epoch, index])
            image = np.roll(image, random.integers(-1, 2, size=2), axis=(0, 1))
            image = image + random.normal(0, 0.1, image.shape)
        return image[..., None].astype(np.float32), int(self.y[index])


class NextEpoch(Callback):
    """Tell the dataset which epoch it is."""

    def __init__(self, data: Images) -> None:
        self.data = data

    def on_epoch_begin(self, trainer: hvdtrain.Trainer, epoch: int) -> None:
        """Set the epoch, before the first sample of it is read."""
        self.data.epoch = epoch


def load() -> tuple[Images, Images]:
    """Return the data to train and to test; every rank gets all of it, and the Trainer shards it."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))  # scikit-learn sorts them by writer
    x, y = digits.images[order] / 8 - 1, digits.target[order]
    return Images(x[:-360], y[:-360], augment=True), Images(x[-360:], y[-360:], augment=False)


def convolution(x, filters: int, size: int = 3, stride: int = 1):
    """Return a convolution of `x`, normalized in groups of 8 channels: by sample, and so alike on any rank."""
    x = keras.layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)
    return keras.layers.GroupNormalization(filters // 8)(x)


def resnet() -> keras.Model:
    """Return a small ResNet: images (batch, 8, 8, 1) to logits (batch, 10)."""
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.ReLU()(convolution(inputs, 16))
    for filters, stride in [(16, 1), (32, 2), (64, 2)]:
        short_cut = x if stride == 1 else convolution(x, filters, 1, stride)
        x = keras.layers.ReLU()(convolution(x, filters, stride=stride))
        x = keras.layers.ReLU()(convolution(x, filters) + short_cut)
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))


def main() -> None:
    """Train, resume if there is a checkpoint, and test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4, help="in all, with those before a checkpoint; %(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="images a step, over all ranks; %(default)s")
    parser.add_argument("--lr", type=float, default=0.05, help="for that batch size; %(default)s")
    parser.add_argument("--checkpoints", default="checkpoints/images-keras", metavar="DIR", help="%(default)s")
    args = parser.parse_args()

    world = hvdtrain.init()  # before the model is made: picks this rank's GPU
    keras.utils.set_random_seed(0)
    train, test = load()
    # The batch of a step does not depend on the number of ranks, and so neither do the steps and the result.
    steps = args.epochs * math.ceil(len(train) / args.batch_size)
    warm_up = max(1, steps // 10)
    rate = keras.optimizers.schedules.CosineDecay(
        args.lr / 10, steps - warm_up, warmup_target=args.lr, warmup_steps=warm_up
    )
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = hvdtrain.Trainer(resnet(), optimizer=optimizer, loss=loss, metrics=["accuracy"])
    callbacks = [NextEpoch(train), Checkpoint(args.checkpoints, keep_last=2, best="val_accuracy")]
    local = args.batch_size // world.size
    trainer.fit(train, validation=test, epochs=args.epochs, batch_size=local, callbacks=callbacks)
    result = trainer.evaluate(test, batch_size=local)  # on every rank: all get the result over all images
    if world.is_root:  # only output here, never a collective
        print(f"ranks {world.size}: loss {result['loss']:.4f}, accuracy {result['accuracy']:.4f}", flush=True)


if __name__ == "__main__":
    main()
