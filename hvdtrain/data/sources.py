"""Turn what the user calls data into steps that all ranks take together.

A `Source` yields `Batch`es; every rank yields the same number of them, and each says how many samples the other ranks
hold, so that short tails can weigh what they hold. Arrays and map-style datasets are sharded by index arithmetic and
cost no communication; anything that can only be iterated is counted in step by one small allreduce a step.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data import sharding
from hvdtrain.distributed import agreement, frameworks
from hvdtrain.distributed.world import SoloWorld, World
from hvdtrain.errors import HvdTrainError


@dataclass(frozen=True)
class Batch:
    """One rank's share of one step.

    A rank without samples in this step has local_count 0, but takes the step: collectives need it. Its data is then a
    filler, for frameworks that must run something, or None where this rank never had any.
    """

    inputs: Any = None  # (local_count, ...), or a tuple or dict of such
    targets: Any = None
    sample_weight: Any = None  # (local_count,)
    local_count: int = 0  # samples on this rank
    global_count: int = 0  # samples on all ranks
    indices: NDArray[np.int64] | None = None  # which samples of the dataset, where that is known
    done: int | None = None  # `Consumed.batches` with this step, where steps may be left out


@dataclass(frozen=True)
class Consumed:
    """What of an epoch is done already, by however many ranks.

    Attributes:
        samples: over all ranks.
        batches: over all ranks, those included that a rank ended without.
        size: how many ranks there were.
    """

    samples: int = 0
    batches: int = 0
    size: int = 1


NOTHING = Consumed()


class Source(Protocol):
    """Steps of an epoch, the same number on every rank."""

    steps: int | None  # per epoch; None where only iterating tells
    facts: dict[str, Any]  # what must be equal on all ranks, as JSON

    def epoch(self, epoch: int, *, shuffle: bool, after: Consumed = NOTHING) -> Iterator[Batch]:
        """Return this rank's batches of one epoch, or of the rest of one, in step with the other ranks.

        Orders are drawn, and workers started, before it returns: what is random in them draws here, and then only
        batch by batch.
        """
        ...

    def example(self, epoch: int) -> Batch | None:
        """Return a batch of the data's shapes, without a step in the orders that later epochs have; None for no data.

        A collective call. Random states may change.
        """
        ...


@dataclass(frozen=True)
class Sharded:
    """Data that is this rank's own share already, such as a dataset that shards itself: it is not shared out again."""

    data: Any


class IndexedSource:
    """Samples that can be read by index.

    Args:
        num_samples: on all ranks together.
        fetch: indices -> (inputs, targets, sample_weight) of these samples.
        batch_size: samples a rank takes in a full step.
        world: whose ranks share the samples.
        seed: order of the shuffle; must be equal on all ranks.
    """

    def __init__(
        self,
        num_samples: int,
        fetch: Callable[[NDArray[np.int64]], tuple[Any, Any, Any]],
        *,
        batch_size: int,
        world: World,
        seed: int,
    ) -> None:
        if num_samples == 0:
            raise ValueError(f"data holds no samples. Received: a dataset of length 0 on rank {world.rank}")
        self._num_samples = num_samples
        self._fetch = fetch
        self._batch_size = batch_size
        self._world = world
        self._seed = seed
        self._newest: tuple[Any, sharding.Shard | None] = (None, None)
        self.facts: dict[str, Any] = {"number of samples": num_samples, "batch_size": batch_size, "seed": seed}
        self.steps: int | None = sharding.steps_per_epoch(num_samples, batch_size=batch_size, size=world.size)

    def epoch(self, epoch: int, *, shuffle: bool, after: Consumed = NOTHING) -> Iterator[Batch]:
        """Return batches by index arithmetic: no communication, and no time for those that are done."""
        left = self._num_samples - after.samples
        steps = sharding.steps_per_epoch(left, batch_size=self._batch_size, size=self._world.size)
        return map(partial(self.batch, epoch, shuffle=shuffle, start=after.samples), range(steps))

    def example(self, epoch: int) -> Batch | None:
        """Return the epoch's first batch."""
        return self.batch(epoch, 0, shuffle=True)

    def batch(self, epoch: int, step: int, *, shuffle: bool, start: int = 0) -> Batch:
        """Return this rank's batch of one step, of those after the epoch's first `start` samples.

        It takes O(batch_size) time and memory, whatever the number of samples.
        """
        mine = self._shard(epoch, shuffle, start)
        left = self._num_samples - start
        held = sharding.samples_in_step(step, left, batch_size=self._batch_size, size=self._world.size)
        indices = mine[step * self._batch_size : (step + 1) * self._batch_size]
        chosen = indices if len(indices) else self._filler(epoch, shuffle)
        return Batch(*self._fetch(chosen), local_count=len(indices), global_count=held, indices=indices)

    def _filler(self, epoch: int, shuffle: bool) -> NDArray[np.int64]:
        """Return the first samples that this rank has in the epoch, gone on with or not; any where it has none."""
        first = self._make_shard(epoch, shuffle, 0)[: self._batch_size]
        return first if len(first) else np.zeros(1, np.int64)

    def _shard(self, epoch: int, shuffle: bool, start: int) -> sharding.Shard:
        key = (epoch, shuffle, start, self._world.rank, self._world.size)
        newest, mine = self._newest
        if mine is None or newest != key:
            mine = self._make_shard(epoch, shuffle, start)
            self._newest = (key, mine)  # in one piece: a prefetching thread may ask for another epoch meanwhile
        return mine

    def _make_shard(self, epoch: int, shuffle: bool, start: int) -> sharding.Shard:
        rank, size = self._world.rank, self._world.size
        return sharding.shard(
            self._num_samples, rank=rank, size=size, epoch=epoch, seed=self._seed, shuffle=shuffle, start=start
        )


class ArraySource(IndexedSource):
    """Arrays: [inputs], [inputs, targets] or [inputs, targets, sample_weight], each of them a tree."""

    def __init__(self, parts: Sequence[Any], *, batch_size: int, world: World, seed: int) -> None:
        num_samples = _common_length(parts, world)
        super().__init__(num_samples, self._take, batch_size=batch_size, world=world, seed=seed)
        # Convert once: otherwise each batch would copy all of what is not an array yet.
        self._parts = [tree_map(as_array, part) for part in parts]
        # Ranks that each pass a part of their own would have it divided again; their first and last samples differ.
        ends = np.array([0, num_samples - 1])
        self.facts["first and last sample (crc32)"] = [
            zlib.crc32(np.asarray(leaf[ends], order="C").tobytes()) for leaf in leaves(self._parts)
        ]

    def _take(self, rows: NDArray[np.int64]) -> tuple[Any, Any, Any]:
        return unpack([take(part, rows) for part in self._parts])


class IteratedSource:
    """Batches that can only be iterated; ranks may hold different numbers of them.

    Args:
        start: (epoch, shuffle, what is done) -> this rank's batches of the rest.
        world: whose ranks take them.
        steps: per epoch, where that is known.
        filler: (number of rows) -> any batch, about as large: for a rank that has had none, as in the rest of an epoch
            that is gone on with. It draws nothing at random; a model may, as many numbers as there are rows.
    """

    def __init__(
        self,
        start: Callable[[int, bool, Consumed], Iterator[Any]],
        *,
        world: World,
        steps: int | None = None,
        filler: Callable[[int], Any] | None = None,
    ) -> None:
        self._start = start
        self._world = world
        self._filler = filler
        self.steps = steps
        self.facts: dict[str, Any] = {"steps": steps}

    def epoch(self, epoch: int, *, shuffle: bool, after: Consumed = NOTHING) -> Iterator[Batch]:
        """Return batches until no rank has any left; a rank that runs out early goes on with empty ones."""
        return self._in_step(iter(self._start(epoch, shuffle, after)), after)

    def example(self, epoch: int) -> Batch | None:
        """Return a batch that is made up, if that is known how: to iterate anew may draw an order of the data's own."""
        if self._filler is not None:
            return as_batch(self._filler(1))
        return next(self.epoch(epoch, shuffle=True), None)

    def _in_step(self, batches: Iterator[Any], after: Consumed) -> Iterator[Batch]:
        batch, done = Batch(), after.batches
        while True:
            item = next(batches, None)
            # An empty batch is still one of this rank's: only None says that there are no more.
            batch = as_batch(item) if item is not None else replace(batch, local_count=0)
            counts = np.array([batch.local_count, item is not None], np.int64)
            samples, going_on = self._world.allreduce(counts, name="samples_in_step")
            if not going_on:
                return
            done += self._world.size
            if samples:
                if batch.inputs is None and self._filler is not None:
                    rows = max(1, after.samples // max(1, after.batches))
                    batch = replace(as_batch(self._filler(rows)), local_count=0)
                # Indices of a share are not the whole dataset's.
                yield replace(batch, global_count=int(samples), indices=None, done=done)


def as_source(data: Any, *, batch_size: int, world: World, seed: int = 0) -> Source:
    """Return the source of steps for whatever the user calls data.

    Args:
        data: arrays `(x, y)` or `(x, y, sample_weight)`, where x and y may be trees (dicts, tuples) of arrays; a
            map-style dataset; a torch DataLoader; a tf.data.Dataset; a keras PyDataset.
        batch_size: samples a rank takes in a full step. Data that is already batched keeps its own.
        world: whose ranks share the data.
        seed: order of the shuffle; must be equal on all ranks.

    A collective call: if it fails on one rank, or ranks were given different data, every rank raises.

    Raises:
        ValueError: no samples, arrays of different lengths, or batch_size < 1.
        TypeError: data of no known kind.
        DesyncError: ranks were given different numbers of samples, other arrays, or other options.
    """
    with agreement.everywhere(world=world, name="data"):
        sharding.check_batch_size(batch_size)
        batch_size = int(batch_size)
        source: Source | None = None
        if isinstance(data, Sharded):
            own_share = _own_share(data.data, batch_size=batch_size, seed=seed, world=world)
            source = IteratedSource(own_share, world=world)
        for base in type(data).__mro__ if source is None else ():
            # A framework's own datasets are read in its folder.
            framework = base.__module__.partition(".")[0]
            if source is None and frameworks.knows(framework):
                module = frameworks.load(framework, "sources")
                source = module.as_source(data, batch_size=batch_size, world=world, seed=seed)
        if source is None:
            several = isinstance(data, tuple | list) and 1 <= len(data) <= 3
            if several and all(part is None or _is_arrays(part) for part in data):
                source = ArraySource(list(data), batch_size=batch_size, world=world, seed=seed)
            elif _is_arrays(data):  # inputs alone, as for predict
                source = ArraySource([data], batch_size=batch_size, world=world, seed=seed)
            elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
                fetch = lambda rows: unpack(collate([data[int(row)] for row in rows]))  # noqa: E731
                source = IndexedSource(len(data), fetch, batch_size=batch_size, world=world, seed=seed)
            else:
                raise TypeError(
                    "data must be a tuple of arrays, a map-style dataset, a torch DataLoader, a tf.data.Dataset or a "
                    f"keras PyDataset. Received: {type(data).__name__} on rank {world.rank}"
                )
    # Data that has a batch size of its own, or none, names it in its facts.
    agreement.require_equal({"batch_size": batch_size, **source.facts}, world=world, what="the data")
    return source


def _own_share(
    data: Any, *, batch_size: int, seed: int, world: World
) -> Callable[[int, bool, Consumed], Iterator[Any]]:
    """Return how to iterate data that shards itself: a loader as it is, anything else as one process would."""
    if hasattr(data, "dataset") and hasattr(data, "sampler"):  # a DataLoader, whose sampler knows its rank

        def whole(epoch: int, shuffle: bool) -> Iterator[Any]:
            for part in (data.sampler, data.batch_sampler, data.dataset):
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
            return iter(data)

    else:
        mine = as_source(data, batch_size=batch_size, world=SoloWorld(), seed=seed)

        def whole(epoch: int, shuffle: bool) -> Iterator[Any]:
            return mine.epoch(epoch, shuffle=shuffle)

    def iterate(epoch: int, shuffle: bool, after: Consumed) -> Iterator[Any]:
        if after.batches and after.size != world.size:
            raise HvdTrainError(
                "Data that is each rank's own share cannot be divided again in the middle of an epoch. Received: a "
                f"checkpoint of {after.size} ranks, taken in epoch {epoch}, on {world.size} ranks. "
                "Resume with as many ranks as before, or from a checkpoint of an epoch's end."
            )
        return islice(whole(epoch, shuffle), after.batches // after.size, None)

    return iterate


def unpack(item: Any) -> tuple[Any, Any, Any]:
    """Split what a dataset yields into (inputs, targets, sample_weight), as Keras and torch users write it."""
    if isinstance(item, tuple | list) and 1 <= len(item) <= 3:
        return tuple(item) + (None,) * (3 - len(item))
    return item, None, None


def as_batch(item: Any) -> Batch:
    """Return what an iterable yielded as a Batch of this rank alone."""
    if isinstance(item, Batch):
        return item
    inputs, targets, weight = unpack(item)
    count = num_rows(inputs)
    return Batch(inputs, targets, weight, count, count)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every leaf of nested dicts, tuples and lists; None stays None."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: tree_map(function, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return rebuild(tree, [tree_map(function, value) for value in tree])
    return function(tree)


def rebuild(like: Any, values: list[Any]) -> Any:
    """Return `values` as a tuple, namedtuple or list of the type of `like`."""
    return type(like)(*values) if hasattr(like, "_fields") else type(like)(values)


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested dicts, tuples and lists, None left out."""
    found: list[Any] = []
    tree_map(found.append, tree)
    return found


def as_array(leaf: Any) -> NDArray[Any]:
    """Return `leaf` in NumPy, which cannot read torch's tensors everywhere; bfloat16, which it lacks, as float32."""
    if hasattr(leaf, "detach"):
        leaf = (leaf.float() if str(leaf.dtype) == "torch.bfloat16" else leaf).detach().cpu()
    return np.asarray(leaf)


def num_rows(tree: Any) -> int:
    """Return the length of axis 0 of a tree of arrays or tensors."""
    first = leaves(tree)[0]
    return int(first.shape[0]) if getattr(first, "shape", None) is not None else len(first)


def take(tree: Any, rows: NDArray[np.int64]) -> Any:
    """Return the given rows of every array in the tree."""
    return tree_map(lambda array: array[rows], tree)  # take() would first copy the whole of an array with strides


def collate(samples: Sequence[Any]) -> Any:
    """Stack samples of one structure into a batch of that structure: leaves of shape (len(samples), ...)."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple | list):
        columns = [collate(column) for column in zip(*samples, strict=True)]
        return rebuild(first, columns) if hasattr(first, "_fields") else tuple(columns)
    return np.stack([as_array(sample) for sample in samples])


def _is_arrays(tree: Any) -> bool:
    found = leaves(tree)
    return bool(found) and all(hasattr(leaf, "shape") and hasattr(leaf, "__array__") and leaf.shape for leaf in found)


def _common_length(parts: Sequence[Any], world: World) -> int:
    names = ("inputs", "targets", "sample_weight")
    lengths = {name: num_rows(part) for name, part in zip(names, parts, strict=False) if part is not None}
    every = {num_rows(leaf) for part in parts if part is not None for leaf in leaves(part)}
    if len(every) > 1:
        raise ValueError(f"Arrays must have one row a sample. Received lengths: {lengths} on rank {world.rank}")
    return every.pop()
