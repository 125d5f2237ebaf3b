"""Train a small ConvNet with hvdtrain.Trainer, in PyTorch or Keras, on one process or many ranks.

python train.py
horovodrun -np 2 python train.py --framework torch
KERAS_BACKEND=jax horovodrun -np 2 python train.py --framework keras
"""

from __future__ import annotations

import argparse
import logging
import sys

import mnist_data

import hvdtrain


def torch_parts(side: int, args: argparse.Namespace) -> dict:
    """Return model, optimizer and loss, in PyTorch."""
    import torch

    torch.manual_seed(args.seed)
    model = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, side)),  # (batch, side, side) -> (batch, 1, side, side)
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * (side // 4) ** 2, 10),
    )
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    return {"model": model, "optimizer": optimizer, "loss": torch.nn.CrossEntropyLoss()}


def keras_parts(side: int, args: argparse.Namespace) -> dict:
    """Return model, optimizer and loss, in Keras, for the backend that KERAS_BACKEND names."""
    import keras

    keras.utils.set_random_seed(args.seed)
    model = keras.Sequential(
        [
            keras.Input((side, side)),
            keras.layers.Reshape((side, side, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    sgd = args.optimizer == "sgd"
    optimizer = keras.optimizers.SGD(args.lr, momentum=0.9) if sgd else keras.optimizers.Adam(args.lr)
    return {"model": model, "optimizer": optimizer, "loss": loss}


PARTS = {"torch": torch_parts, "keras": keras_parts}


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=sorted(PARTS), default="torch", help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step; default: %(default)s")
    parser.add_argument("--lr", type=float, default=0.005, help="learning rate; default: %(default)s")
    parser.add_argument("--lr-scaling", choices=["none", "linear", "sqrt"], default="none", help="by number of ranks")
    parser.add_argument("--warmup-epochs", type=float, default=0, help="epochs of rising rate; default: %(default)s")
    parser.add_argument("--optimizer", choices=["adam", "sgd"], default="adam", help="sgd has momentum 0.9")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and sample order; default: %(default)s")
    mnist_data.add_arguments(parser)
    return parser.parse_args()


def print_table(row: dict[str, str]) -> None:
    """Print names above values, in one write, so that other ranks' lines do not mix with them."""
    widths = [max(len(name), len(value)) for name, value in row.items()]
    lines = [[cell.rjust(width) for cell, width in zip(cells, widths, strict=True)] for cells in (row, row.values())]
    sys.stdout.write("".join("  ".join(cells) + "\n" for cells in lines))
    sys.stdout.flush()


def main() -> None:
    """Train, test and print the result."""
    args = parse_arguments()
    # Before the model is created: init selects this rank's GPU.
    world = hvdtrain.init(args.framework)
    if world.is_root:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("hvdtrain").setLevel(logging.INFO)

    train, test = mnist_data.load_or_exit(args)
    # All ranks pass the same data and the same options; the Trainer shards the samples.
    parts = PARTS[args.framework](side=train.x.shape[1], args=args)
    schedule = {"lr_scaling": args.lr_scaling, "warmup_epochs": args.warmup_epochs}
    trainer = hvdtrain.Trainer(**parts, metrics=["accuracy"], **schedule, seed=args.seed)
    history = trainer.fit(train, epochs=args.epochs, batch_size=args.batch_size)
    result = trainer.evaluate(test)  # call it on all ranks: all get the result over all images

    seconds = sum(history["seconds"])
    if world.is_root:
        backend = f"/{sys.modules['keras'].backend.backend()}" if args.framework == "keras" else ""
        print_table(
            {
                "framework": args.framework + backend,
                "ranks": str(world.size),
                "loss": f"{result['loss']:.4f}",
                "accuracy": f"{result['accuracy']:.4f}",
                "images/s": f"{len(train.y) * args.epochs / seconds:,.0f}",
                "seconds": f"{seconds:.1f}",
            }
        )


if __name__ == "__main__":
    main()
