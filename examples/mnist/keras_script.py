"""A Keras script written for Horovod. The only change is the import of hvdtrain.keras.

horovodrun -np 2 python keras_script.py
KERAS_BACKEND=jax horovodrun -np 2 python keras_script.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import hvdtrain.keras as hvd  # isort: skip  before Keras: hides TensorFlow's start-up notes
import keras
import mnist_data


def make_model(side: int) -> keras.Model:
    """Return two convolutions and a dense layer. Output: logits, (batch, 10)."""
    return keras.Sequential(
        [
            keras.Input((side, side, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def shard(images: mnist_data.Images) -> mnist_data.Images:
    """Return this rank's images. All ranks get the same number, because Keras's fit must take equal steps on each.

    Up to size - 1 images are dropped. hvdtrain.Trainer drops none.
    """
    even = len(images.y) // hvd.size() * hvd.size()
    mine = slice(hvd.rank(), even, hvd.size())
    return mnist_data.Images(images.x[mine, ..., None], images.y[mine])


def main() -> None:
    """Train on this rank's shard, test, save on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step; default: %(default)s")
    parser.add_argument("--lr", type=float, default=0.005, help="learning rate; default: %(default)s")
    parser.add_argument("--save", default="checkpoints/mnist.keras", metavar="FILE", help="default: %(default)s")
    mnist_data.add_arguments(parser)
    args = parser.parse_args()

    hvd.init()  # also selects this rank's GPU, by local rank
    keras.utils.set_random_seed(0)
    train, test = mnist_data.load_or_exit(args)

    model = make_model(side=train.x.shape[1])
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(args.lr)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # every rank starts with rank 0's weights
        hvd.callbacks.MetricAverageCallback(),  # before all callbacks that read metrics
        hvd.callbacks.LearningRateWarmupCallback(args.lr, warmup_epochs=1),
    ]
    history = model.fit(
        *shard(train),
        validation_data=shard(test),
        epochs=args.epochs,
        batch_size=args.batch_size,
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )
    if hvd.rank() == 0:  # only I/O in here
        path = Path(args.save)
        path.parent.mkdir(parents=True, exist_ok=True)
        model.save(path)
        loss, accuracy = history.history["val_loss"][-1], history.history["val_accuracy"][-1]
        print(f"ranks {hvd.size()}  loss {loss:.4f}  accuracy {accuracy:.4f}  saved {path}", flush=True)


if __name__ == "__main__":
    main()
