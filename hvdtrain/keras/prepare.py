"""Custom loops in Keras: the model, its optimizer and its data, for this rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain.data.reading import as_source
from hvdtrain.data.sources import IndexedSource
from hvdtrain.data.trees import num_rows, tree_map
from hvdtrain.distributed import streams
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import World
from hvdtrain.keras import training_state
from hvdtrain.keras.variables import broadcast_model


def prepare(
    model: keras.Model, optimizer: Any, data: tuple[Any, ...], *, batch_size: int, rank_streams: bool, world: World
) -> Any:
    """See `hvdtrain.prepare`; use the result in `model.compile` and `model.fit`, or in a custom loop."""
    if not model.built:
        raise ValueError(f"prepare needs a built model: give it a keras.Input, or call it once. Received: {model.name}")
    if not model.trainable_variables:
        raise ValueError(f"model has no trainable parameters. Received: {model.name}")
    distributed = hvd.DistributedOptimizer(optimizer, process_set=world.data_set)
    if world.size > 1:
        distributed.build(model.trainable_variables)
        broadcast_model(model, distributed, root_rank=0)
        if rank_streams:
            states = training_state.random_states(model)
            streams.separate(states, lambda seeds: training_state.reseed(seeds, model), world=world)
    prepared = [PreparedData(each, batch_size, world) for each in data]
    in_tensorflow = keras.backend.backend() == "tensorflow"
    return (model, distributed, *(map(_as_tf_dataset, prepared) if in_tensorflow else prepared))


def _as_tf_dataset(data: PreparedData) -> Any:
    """Return a tf.data.Dataset of the same batches, a new order each time it is iterated.

    TensorFlow prefetches in threads, also for passes that Keras has abandoned, so a batch must not depend on when it is
    fetched. Each pass is an epoch, numbered by the order in which passes start, which is equal on all ranks.
    """
    import tensorflow as tf

    epochs = itertools.count()

    def one_pass() -> Iterator[Any]:
        epoch = next(epochs)
        return (data.batch(epoch, step) for step in range(len(data)))

    signature = tree_map(lambda array: tf.TensorSpec((None, *array.shape[1:]), array.dtype), data.batch(0, 0))
    batches = tf.data.Dataset.from_generator(one_pass, output_signature=signature)
    return batches.apply(tf.data.experimental.assert_cardinality(len(data))).prefetch(tf.data.AUTOTUNE)


class PreparedData(keras.utils.PyDataset):
    """This rank's batches (inputs, targets, sample_weight), as many as every rank's, in a new order each epoch.

    Sample weights make a short tail weigh by its samples; a rank without samples left gets a filler of weight 0.

    Args:
        data: arrays `(x, y)` or `(x, y, sample_weight)`, or a map-style dataset of such samples. Data that can only be
            iterated is a TypeError; the Trainer takes it.
        batch_size: samples per rank and step.
        world: the ranks that share the data.
    """

    def __init__(self, data: Any, batch_size: int, world: World) -> None:
        super().__init__()
        source = as_source(data, batch_size=batch_size, world=world, seed=world.seed or 0)
        if not isinstance(source, IndexedSource):
            raise TypeError(
                f"prepare needs arrays or a map-style dataset. Received: {type(data).__name__} on rank {world.rank}. "
                "Use hvdtrain.Trainer, which takes such data."
            )
        self._source, self._ranks = source, DataRanks(world)
        self._epoch = self._next = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next pass has, for example after resuming."""
        self._epoch, self._next = epoch, 0

    def __len__(self) -> int:
        return self._source.steps or 0

    def __getitem__(self, index: int) -> tuple[Any, Any, Any]:
        # Not `index`: Keras's shuffle of batches differs from rank to rank, and ranks must take the same steps.
        step, self._next = self._next % len(self), self._next + 1
        return self.batch(self._epoch, step)

    def on_epoch_end(self) -> None:
        """Switch to the next epoch's order. Keras calls it, also once after it has read the first batch."""
        self.set_epoch(self._epoch + (self._next >= len(self)))

    def batch(self, epoch: int, step: int) -> tuple[Any, Any, Any]:
        """Return this rank's (inputs, targets, sample_weight) of one step."""
        batch = self._source.batch(epoch, step)
        weight = batch.local_count * self._ranks.size / batch.global_count
        given = batch.sample_weight
        given = np.ones(num_rows(batch.inputs), np.float32) if given is None else np.asarray(given)
        return tree_map(np.asarray, batch.inputs), tree_map(np.asarray, batch.targets), given * np.float32(weight)
