"""For loops of the user's own: make model, optimizer and data work on all ranks."""

from __future__ import annotations

from typing import Any

from hvdtrain.adapter import framework_of
from hvdtrain.distributed import frameworks
from hvdtrain.distributed.world import init


def prepare(model: Any, optimizer: Any, *data: Any, batch_size: int = 32) -> tuple[Any, ...]:
    """Return (model, optimizer, *data) for this rank, to be used in place of the user's own.

    The model is on this rank's device and holds rank 0's weights; the optimizer reduces gradients over ranks (see
    `DistributedOptimizer`); data is shared out, and yields the same number of batches on every rank. Where the samples
    do not divide evenly, a short batch's gradient weighs what it holds; a rank that has none left gets a filler batch
    that weighs nothing.

    Args:
        model: a torch.nn.Module, or a keras.Model that is built.
        optimizer: the framework's own optimizer.
        data: torch: DataLoaders over map-style datasets. Keras: arrays `(x, y)` or `(x, y, sample_weight)`, or
            map-style datasets. What can only be iterated (IterableDataset, tf.data, PyDataset) is the Trainer's.
        batch_size: samples a rank takes in a step, in Keras; a DataLoader keeps its own.

    Raises:
        TypeError: a model or data of another kind.
        ValueError: data without samples, or a model without trainable parameters.
    """
    framework = framework_of(model)
    world = init(framework)
    prepared: tuple[Any, ...] = frameworks.load(framework, "prepare").prepare(
        model, optimizer, data, batch_size=batch_size, world=world
    )
    return prepared
