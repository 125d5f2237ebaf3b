"""Read the user's data as a source of steps: arrays, map-style datasets, and the kinds that frameworks have."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data import sharding
from hvdtrain.data.contents import SAMPLES, Contents, compare, leaves_of, read_here, subsets
from hvdtrain.data.generators import generators_of
from hvdtrain.data.prefetch import Prefetch
from hvdtrain.data.sources import (
    ROWS_OF_ARRAYS,
    ArraySource,
    Consumed,
    IndexedSource,
    IteratedSource,
    NoSamples,
    Sharded,
    Source,
    Start,
    skip,
)
from hvdtrain.data.trees import are_arrays, collate, leaves
from hvdtrain.data.workers import RepeatedSamples
from hvdtrain.distributed import agreement, frameworks
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.launch_environment import count_ranks
from hvdtrain.distributed.world import SoloWorld, World
from hvdtrain.errors import HvdTrainError

_SAME_DATA = (
    "Give every rank the same data and batch_size. Set a seed before data is made or split at random, as in "
    "random_split(data, lengths, generator=torch.Generator().manual_seed(0)); sort what has no order, such as a set of "
    "labels or os.listdir: sorted(set(labels)). If each rank has its own part of the data, pass it as "
    "hvdtrain.Sharded(data)."
)


def as_source(
    data: Any,
    *,
    batch_size: int,
    world: World,
    seed: int = 0,
    what: str = "data",
    prefetch: Prefetch | None = None,
) -> Source:
    """Return the source of steps for the user's data. A collective: if ranks' data differ, or one fails, all raise.

    Messages call the data `what`. `prefetch` gathers batches of arrays before they are asked for.
    """
    with agreement.everywhere(world=world, name="data"):
        sharding.check_batch_size(batch_size)
        batch_size = int(batch_size)
        try:
            source = _read(data, batch_size=batch_size, ranks=DataRanks(world), seed=seed, prefetch=prefetch)
            if not isinstance(source, ArraySource):  # arrays hold none
                given = data.data if isinstance(data, Sharded) else data
                replays = source.generators.replays
                source.generators = generators_of(given, replays=replays, is_root=world.is_root)
        except NoSamples as found:
            raise ValueError(f"{what} holds no samples. Received: {found} on rank {world.rank}") from None
        contents = source.contents if world.size > 1 else None
        # Data with its own batch size, or without one, names it in its facts.
        facts = {"batch_size": batch_size, **source.facts, **(contents.exact() if contents else {})}
    agreement.require_equal(facts, world=world, what=f"the {what}", advice=_SAME_DATA)
    compare(contents, source.generators, world=world, what=what, advice=_SAME_DATA)
    return source


def _read(data: Any, *, batch_size: int, ranks: DataRanks, seed: int, prefetch: Prefetch | None) -> Source:
    """Return the source; NoSamples if the data are empty. Ranks may differ."""
    of_rank: dict[str, Any] = {"batch_size": batch_size, "ranks": ranks, "seed": seed}
    rank = ranks.world.rank
    # A framework's folder reads the framework's datasets.
    for framework in dict.fromkeys(base.__module__.partition(".")[0] for base in type(data).__mro__):
        if framework in frameworks.FOLDERS:
            source: Source | None = frameworks.load(framework, "sources").as_source(data, **of_rank)
            if source is not None:
                return source
    several = isinstance(data, tuple | list) and 1 <= len(data) <= 3
    if isinstance(data, Sharded):
        return IteratedSource(_own_share(data.data, **of_rank, prefetch=prefetch), ranks=ranks, replays=True)
    if several and all(part is None or are_arrays(part) for part in data):
        return ArraySource(list(data), **of_rank, prefetch=prefetch)
    if several and isinstance(data, tuple) and any(isinstance(part, list) or are_arrays(part) for part in data):
        kinds = ", ".join(type(part).__name__ for part in data)
        raise TypeError(
            f"A tuple must hold arrays or tensors: (inputs, targets). Received: ({kinds}) on rank {rank}. "
            "Pass arrays, (np.asarray(x), np.asarray(y)), or a list of samples, [*zip(x, y)]"
        )
    is_samples = isinstance(data, list) and all(isinstance(item, tuple | dict) for item in data)
    if are_arrays(data) and not is_samples:  # one array, or a dict of them
        return ArraySource(data, **of_rank, prefetch=prefetch)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        dataset = IndexedSource(len(data), partial(_fetch, data, rank=rank), **of_rank)
        read = partial(read_here, lambda row: leaves_of(data[row]))
        most = ROWS_OF_ARRAYS if isinstance(data, list | tuple) else SAMPLES
        dataset.contents = Contents(data, len(data), read, partial(subsets, data), most=most)
        return dataset
    if hasattr(data, "__iter__"):  # a generator, or another iterable without samples by index
        raise TypeError(
            "Data that can only be iterated must start again in each epoch: yield it in __iter__ of a "
            "torch.utils.data.IterableDataset, or use tf.data.Dataset.from_generator. If each rank yields its own "
            f"part, pass hvdtrain.Sharded(dataset). Received: {type(data).__name__} on rank {rank}"
        )
    raise TypeError(
        "data must be a tuple of arrays, a map-style dataset, a torch DataLoader, a tf.data.Dataset or a "
        f"keras PyDataset. Received: {type(data).__name__} on rank {rank}"
    )


def _fetch(data: Any, rows: NDArray[np.int64], *, rank: int) -> Any:
    """Return these samples of a map-style dataset as one item."""
    samples = [data[int(row)] for row in rows]
    try:
        return collate(samples)
    except ValueError as error:
        shapes = [[np.shape(leaf) for leaf in leaves(sample)] for sample in samples]
        other = next((each for each in shapes if each != shapes[0]), None)
        if other is None:
            raise
        raise ValueError(
            f"The samples of a batch must have equal shapes. Received: {shapes[0]} and {other} on rank {rank}. Pad "
            "them to one length in the dataset, or pass a DataLoader whose collate_fn pads a batch."
        ) from error


def _own_share(data: Any, *, batch_size: int, seed: int, ranks: DataRanks, prefetch: Prefetch | None) -> Start:
    """Return a function that iterates sharded data: a loader as it is, other data as on one process."""
    if hasattr(data, "dataset") and hasattr(data, "sampler"):  # a DataLoader, whose sampler knows its rank
        repeated = RepeatedSamples(data, is_root=ranks.world.is_root)

        def whole(epoch: int, shuffle: bool) -> Iterator[Any]:
            for part in (data.sampler, data.batch_sampler, data.dataset):
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
            return repeated.watch(iter(data))

    else:
        mine = _read(data, batch_size=batch_size, ranks=DataRanks(SoloWorld()), seed=seed, prefetch=prefetch)

        def whole(epoch: int, shuffle: bool) -> Iterator[Any]:
            return mine.epoch(epoch, shuffle=shuffle)

    def iterate(epoch: int, shuffle: bool, after: Consumed) -> Iterator[Any]:
        if after.batches and after.size != ranks.size:
            raise HvdTrainError(
                "Data that is each rank's own share cannot be divided again in the middle of an epoch. Received: a "
                f"checkpoint of {count_ranks(after.size)}, taken in epoch {epoch}, on {count_ranks(ranks.size)}. "
                "Resume with as many ranks as before, or from a checkpoint of an epoch's end."
            )
        items = whole(epoch, shuffle)
        skip(items, after.batches // after.size)
        return items

    return iterate
