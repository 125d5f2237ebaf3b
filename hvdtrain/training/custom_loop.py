"""For loops of the user's own: make model, optimizer and data work on all ranks."""

from __future__ import annotations

from typing import Any

from hvdtrain.adapter import framework_of
from hvdtrain.distributed import frameworks
from hvdtrain.distributed.world import init, refuse_grid


def prepare(model: Any, optimizer: Any, *data: Any, batch_size: int = 32, rank_streams: bool = True) -> tuple[Any, ...]:
    """Return (model, optimizer, *data) for this rank, to be used in place of the user's own.

    The model is on this rank's device and holds rank 0's weights; the optimizer reduces gradients over ranks (see
    `DistributedOptimizer`); data is shared out, and yields the same number of batches on every rank. Where the samples
    do not divide evenly, a short batch's gradient is weighted by its samples; a rank without samples gets a filler
    batch of weight 0.

    Args:
        model: a torch.nn.Module, or a keras.Model that is built.
        optimizer: the framework's own optimizer.
        data: torch: DataLoaders over map-style datasets. Keras: arrays `(x, y)` or `(x, y, sample_weight)`, or
            map-style datasets. Data that can only be iterated (IterableDataset, tf.data, PyDataset) needs the Trainer.
        batch_size: samples per rank and step, for Keras; a DataLoader has its own batch size.
        rank_streams: as for the Trainer, from this call on. So split data at random before it, or with a generator of
            its own.

    Raises:
        TypeError: a model or data of another kind.
        ValueError: data without samples, or a model without trainable parameters.
    """
    framework = framework_of(model)
    world = init(framework)
    refuse_grid("hvdtrain.prepare", "See the methods of the Grid")
    prepared: tuple[Any, ...] = frameworks.load(framework, "prepare").prepare(
        model, optimizer, data, batch_size=batch_size, rank_streams=rank_streams, world=world
    )
    return prepared
