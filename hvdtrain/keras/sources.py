"""tf.data.Datasets and keras PyDatasets, divided over ranks batch by batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import keras
import numpy as np

from hvdtrain.data import sharding
from hvdtrain.data.contents import Contents, leaves_of, read_here, subsets
from hvdtrain.data.sources import Consumed, IteratedSource, NoSamples, Source
from hvdtrain.data.trees import tree_map
from hvdtrain.distributed import rank_state
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.keras.epoch_hooks import EpochHooks


def as_source(data: Any, *, batch_size: int, ranks: DataRanks, seed: int) -> Source | None:
    """Return the source for a tf.data.Dataset or a PyDataset; None for anything else (a KerasTensor, say).

    Both yield batches. Step k has batches k * size to (k + 1) * size - 1 of one process, one for each rank.
    """
    if isinstance(data, keras.utils.PyDataset):
        return _pydataset(data, ranks, seed)
    if any(base.__name__ == "DatasetV2" for base in type(data).__mro__):
        return _tf_dataset(data, ranks)
    return None


def _pydataset(data: keras.utils.PyDataset, ranks: DataRanks, seed: int) -> Source:
    if len(data) == 0:
        raise NoSamples(f"a {type(data).__name__} of length 0")
    hooks = EpochHooks(data, world=ranks.world, seed=seed)

    def batches(epoch: int, shuffle: bool, after: Consumed) -> Iterator[Any]:
        if shuffle:  # in training
            hooks.begin(epoch)
        where = {"rank": ranks.rank, "size": ranks.size, "epoch": epoch, "seed": seed}
        return (data[int(i)] for i in sharding.shard(len(data), **where, shuffle=shuffle, start=after.batches))

    def filler(_: int) -> Any:
        with rank_state.random_states_restored():  # reading an item may draw random numbers, to augment it
            return data[0]

    source = IteratedSource(batches, ranks=ranks, steps=-(-len(data) // ranks.size), filler=filler)
    read = partial(read_here, lambda index: leaves_of(data[index]))
    source.contents = Contents(data, len(data), read, partial(subsets, data), most=2, unit="batch")
    return source


def _tf_dataset(data: Any, ranks: DataRanks) -> Source:
    seeds = _seeds_of_orders(data, ranks)  # on one rank too: an epoch may resume on two
    cardinality = int(data.cardinality())  # in batches; negative: infinite or unknown
    if cardinality == 0:
        raise NoSamples("an empty tf.data.Dataset")
    orders = itertools.count()  # counts what the data's shuffle has drawn

    def for_backend(item: Any) -> Any:
        return item if keras.backend.backend() == "tensorflow" else tree_map(np.asarray, item)

    def batches(epoch: int, shuffle: bool, after: Consumed) -> Iterator[Any]:
        # The data's shuffle draws one order per iterator: a run that resumes in epoch 3 must draw the fourth.
        for _ in range(next(orders), epoch):
            next(orders)
            iter(data)
        rest = data.skip(after.batches) if after.batches else data
        return map(for_backend, iter(rest.shard(ranks.size, ranks.rank) if ranks.size > 1 else rest))

    steps = -(-cardinality // ranks.size) if cardinality > 0 else None
    source = IteratedSource(batches, ranks=ranks, steps=steps, filler=lambda rows: for_backend(_zeros(data, rows)))
    source.reads_in_threads = True
    source.facts["seeds of shuffle (global, own)"] = seeds
    if cardinality == -1:
        source.facts["endless"] = True
    return source


def _zeros(data: Any, rows: int) -> Any:
    """Return a batch of zeros in a dataset's shapes; to read a real one would advance its shuffle."""
    import tensorflow as tf

    def zeros(spec: Any) -> Any:
        return tf.zeros([size or (1 if axis else rows) for axis, size in enumerate(spec.shape)], spec.dtype)

    return tf.nest.map_structure(zeros, data.element_spec)


def _seeds_of_orders(data: Any, ranks: DataRanks) -> list[list[int]]:
    """Return the seeds of the data's order, for the ranks to compare; ValueError if the order differs between them."""
    found: list[list[int]] = []
    problem = "deterministic=False" if data.options().deterministic is False else ""
    for dataset in _upstream(data):
        seeds = [int(seed) for name in ("_seed", "_seed2") if (seed := getattr(dataset, name, None)) is not None]
        if seeds:
            found.append(seeds)
        if type(dataset).__name__ == "_ShuffleDataset" and seeds and not any(seeds):
            problem = "a shuffle() that needs a seed,"
        elif ranks.size > 1 and _is_unordered(dataset):
            problem = "deterministic=False"
    if problem and ranks.size > 1:
        raise ValueError(
            "tf.data must yield the same order on every rank: otherwise samples would be seen twice or never. "
            f"Received: {problem} on rank {ranks.world.rank}. Use shuffle(n, seed=0) and no deterministic=False, or "
            "hvdtrain.Sharded(dataset) if every rank already has its own share."
        )
    return found


def _upstream(data: Any) -> list[Any]:
    """Return `data` and all that it reads from, each once; checkpoints hold their seeds in this order."""
    pending, found = [data], {}
    while pending:
        dataset = pending.pop()
        if id(dataset) not in found:
            found[id(dataset)] = dataset
            pending += [each for each in dataset._inputs() if hasattr(each, "_inputs")]
    return list(found.values())


def _is_unordered(dataset: Any) -> bool:
    """Return whether this transformation was given deterministic=False."""
    if type(dataset).__name__ != "_ParallelInterleaveDataset":
        return bool(getattr(dataset, "_deterministic", None) == "false")
    import tensorflow as tf

    # interleave does not store the option; the graph does. Its input is usually a list of files, so the graph is small.
    graph = tf.compat.v1.GraphDef.FromString(dataset._as_serialized_graph().numpy())
    return any(node.attr["deterministic"].s == b"false" for node in graph.node)
