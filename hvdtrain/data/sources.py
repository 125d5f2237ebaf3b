"""Sources: the steps of an epoch, which all ranks take together.

A `Source` yields the same number of `Batch`es on every rank. Each batch has the number of samples on all ranks, which
weights short tails. Arrays and map-style datasets are sharded by index arithmetic, without communication. Iterable data
needs one small allreduce per step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data import sharding
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.contents import (
    Contents,
    Leaves,
    exact_columns,
    leaves_of,
    some_rows,
)
from hvdtrain.data.generators import Generators
from hvdtrain.data.plan import Part, Plan
from hvdtrain.data.prefetch import Prefetch
from hvdtrain.data.sharding import Indices
from hvdtrain.data.trees import (
    as_array,
    check_objects,
    crc32,
    first_values,
    leaves,
    num_rows,
    take,
    tree_map,
    unpack,
)
from hvdtrain.distributed.data_ranks import DataRanks


@dataclass(frozen=True)
class Batch:
    """One rank's part of one step.

    A rank without samples in this step has local_count 0, but takes the step, because collectives need it. Its data is
    then a filler, for frameworks that must run something, or None if this rank never had data.
    """

    inputs: Any = None  # (local_count, ...), or a tuple or dict of such
    targets: Any = None
    sample_weight: Any = None  # (local_count,)
    local_count: int = 0  # samples on this rank
    global_count: int = 0  # samples on all ranks
    indices: NDArray[np.int64] | None = None  # which samples of the dataset, if known
    done: int | None = None  # `Consumed.batches` after this step, if steps may be skipped
    item: Any = None  # all of it, as the data yields it
    largest: int | None = None  # samples on the rank that has most; None where ranks differ by at most one


@dataclass(frozen=True)
class Consumed:
    """The part of an epoch that is done."""

    samples: int = 0  # over all ranks
    batches: int = 0  # over all ranks; batches without samples count
    size: int = 1  # the number of ranks
    assignment: Assignment | None = None  # what each rank has left, where they have taken different numbers of samples


NOTHING = Consumed()


class NoSamples(Exception):  # noqa: N818 - `as_source` makes it a ValueError, with the name of the data
    """A dataset is empty; says what it is."""


ROWS_OF_ARRAYS = 64  # that ranks compare

# Indices -> these samples, as one item.
Fetch = Callable[[NDArray[np.int64]], Any]
# (epoch, shuffle, consumed) -> this rank's batches of the rest of the epoch.
Start = Callable[[int, bool, Consumed], Iterator[Any]]


class Source(Protocol):
    """Steps of an epoch, the same number on every rank."""

    steps: int | None  # per epoch; None if unknown before the epoch's end
    facts: dict[str, Any]  # JSON values that must be equal on all ranks; "endless" if an epoch is known never to end
    generators: Generators  # those that the data hold
    contents: Contents | None  # what ranks compare when a source is made; None for data without samples by index

    def epoch(self, epoch: int, *, shuffle: bool, after: Consumed = NOTHING) -> Iterator[Batch]:
        """Return this rank's batches of one epoch, or of its rest, as many as on the other ranks.

        Before it returns, it draws orders, starts workers, and reads again what must be read before the rest. Later it
        draws random numbers only batch by batch.
        """

    def example(self, epoch: int) -> Batch | None:
        """Return a batch with the data's shapes, or None if there is no data. The orders of later epochs do not change.

        A collective. Random states may change.
        """


@runtime_checkable
class DivisibleSource(Source, Protocol):
    """A source that can give ranks parts of any size, because it reads samples by index.

    With `Consumed.assignment`, a rank gets what it has left of its own part: it may have more batches than other ranks,
    and `Batch.global_count` is unknown: that of this rank.
    """

    shares: Sequence[int] | None  # samples of a whole step by rank, from the next `rest` on; None for equal parts

    def rest(self, epoch: int, after: Consumed) -> Iterator[Batch]:
        """Return this rank's batches of the rest of the epoch that `epoch` has begun, in the order drawn then."""


@runtime_checkable
class OrderedSource(Source, Protocol):
    """A source that can yield all samples of its dataset, each one once, for predictions."""

    def in_order(self) -> Iterator[Batch]:
        """Return this rank's batches; their `indices` are the samples' places in the dataset.

        Raises:
            TypeError: if the samples' order is one of the user's own, which leaves samples out or repeats them.
        """


def as_divisible(source: Source, *, need: str) -> DivisibleSource:
    """Return the source; TypeError with the sentence `need` if it cannot give ranks parts of any size."""
    if not isinstance(source, DivisibleSource):
        raise TypeError(
            f"{need} Received: data that can only be iterated, in whole batches. Give arrays, a map-style dataset, or "
            "a DataLoader with a batch_size."
        )
    return source


@dataclass(frozen=True)
class Sharded:
    """Data that is sharded already, such as a dataset that reads its rank. It is not sharded again."""

    data: Any


class IndexedSource:
    """Samples that can be read by index."""

    shares: Sequence[int] | None = None
    contents: Contents | None = None
    _prefetch: Prefetch | None = None  # reads rows of `_columns` ahead, which are all that there is to read
    _columns: Any = None

    def __init__(self, num_samples: int, fetch: Fetch, *, batch_size: int, ranks: DataRanks, seed: int) -> None:
        if num_samples == 0:
            raise NoSamples("a dataset of length 0")
        self._num_samples, self._fetch, self._seed = num_samples, fetch, seed
        self._of_rank: dict[str, Any] = {"batch_size": batch_size, "rank": ranks.rank, "size": ranks.size}
        self._newest: tuple[int, Plan] | None = None  # the epoch, in equal parts, that `batch` has read last
        self.generators = Generators({})
        self.facts: dict[str, Any] = {"number of samples": num_samples, "batch_size": batch_size, "seed": seed}
        self.steps: int | None = len(self._plan(0, False))

    def epoch(self, epoch: int, *, shuffle: bool, after: Consumed = NOTHING) -> Iterator[Batch]:
        """Return batches by index arithmetic: without communication, and without time for samples that are done."""
        plan = self._plan(epoch, shuffle, after.samples, shares=self.shares, assignment=after.assignment)
        whole = self._plan(epoch, shuffle)
        if self._prefetch is None:
            return map(partial(self._batch, whole), plan)
        wanted = ((part, self._rows(whole, part)) for part in plan)
        return (self._batch(whole, part, item) for part, item in self._prefetch.read(self._columns, wanted))

    def rest(self, epoch: int, after: Consumed) -> Iterator[Batch]:
        """Return batches of the rest of a shuffled epoch."""
        return self.epoch(epoch, shuffle=True, after=after)

    def in_order(self) -> Iterator[Batch]:
        """Return batches of all samples."""
        return self.epoch(0, shuffle=False)

    def example(self, epoch: int) -> Batch | None:
        """Return the epoch's first batch."""
        return next(self.epoch(epoch, shuffle=True))

    def batch(self, epoch: int, step: int) -> Batch:
        """Return this rank's batch of a step of a shuffled epoch, in equal parts, in O(batch_size)."""
        newest = self._newest  # one object because of threads
        if newest is None or newest[0] != epoch:
            self._newest = newest = (epoch, self._plan(epoch, True))
        return self._batch(newest[1], newest[1][step])

    def _batch(self, whole: Plan, part: Part, item: Any = None) -> Batch:
        """Return a part as a batch, with the item that was read of it; None to read it now."""
        item = self._fetch(self._rows(whole, part)) if item is None else item
        return Batch(*unpack(item), len(part.indices), part.global_count, part.indices, item=item, largest=part.largest)

    def _rows(self, whole: Plan, part: Part) -> Indices:
        """Return the rows to read: without samples those of the rank's first part of the epoch, or else any row."""
        indices = part.indices if len(part.indices) else whole[0].indices
        return indices if len(indices) else np.zeros(1, np.int64)

    def _plan(self, epoch: int, shuffle: bool, start: int = 0, **division: Any) -> Plan:
        order = sharding.EpochOrder(self._num_samples, epoch=epoch, seed=self._seed, shuffle=shuffle)
        return Plan(order.at, self._num_samples, start=start, **self._of_rank, **division)


class ArraySource(IndexedSource):
    """A tree of arrays; a tuple or list of up to three is (inputs, targets, sample_weight).

    Args:
        item: the tree.
        prefetch: gathers batches before they are asked for; None to gather them then.
    """

    def __init__(self, item: Any, *, prefetch: Prefetch | None = None, **options: Any) -> None:
        num_samples, *others = {num_rows(leaf) for leaf in leaves(item)}
        if others:
            named = zip(("inputs", "targets", "sample_weight"), unpack(item), strict=True)
            lengths = {name: num_rows(part) for name, part in named if part is not None}
            rank = options["ranks"].world.rank
            raise ValueError(f"Arrays must have one row per sample. Received lengths: {lengths} on rank {rank}")
        # Convert whole arrays once: otherwise each batch would copy all of what is not an array yet.
        columns = tree_map(as_array, item)
        self._columns, self._prefetch = columns, prefetch
        for leaf in leaves(columns):
            check_objects(leaf, options["ranks"].world.rank)
        super().__init__(num_samples, lambda rows: take(columns, rows), **options)
        # They differ if each rank passes its own part of the data, which would be sharded again.
        ends = [0, num_samples - 1]
        self.facts["first sample"] = "; ".join(first_values(leaf[0]) for leaf in leaves(columns))
        crcs = [crc32(leaf[ends]) for leaf in leaves(columns)]
        self.facts["first and last sample (crc32)"] = crcs

        def read(rows: Sequence[int], _: Generators) -> Iterator[Leaves]:
            return (leaves_of(tree_map(itemgetter(row), columns)) for row in rows)

        def exact() -> dict[str, str]:
            return exact_columns(tree_map(some_rows, columns))

        self.contents = Contents(self, num_samples, read, exact, most=ROWS_OF_ARRAYS)


class IteratedSource:
    """Iterable batches; ranks may have different numbers of them.

    `filler` returns any batch of so many rows, for a rank without batches, for example in the rest of a resumed epoch.
    It draws no random numbers; a model may draw some for each row. `replays`: see `Generators`. `reads_in_threads`: a
    framework's threads read all of the data on each rank, and may draw from Python's and NumPy's generators at any
    time: ranks keep these equal.
    """

    reads_in_threads = False
    contents: Contents | None = None

    def __init__(
        self,
        start: Start,
        *,
        ranks: DataRanks,
        steps: int | None = None,
        filler: Callable[[int], Any] | None = None,
        replays: bool = False,
    ) -> None:
        self._start = start
        self._ranks = ranks
        self._filler = filler
        self.generators = Generators({}, replays=replays)
        self.steps = steps
        self.facts: dict[str, Any] = {"steps": steps}

    def epoch(self, epoch: int, *, shuffle: bool, after: Consumed = NOTHING) -> Iterator[Batch]:
        """Return batches until no rank has more; a rank that has no more yields empty ones."""
        return self._in_step(iter(self._start(epoch, shuffle, after)), after)

    def example(self, epoch: int) -> Batch | None:
        """Return a filler if there is one: another iteration might draw an order of the data."""
        if self._filler is not None:
            return as_batch(self._filler(1))
        return next(self.epoch(epoch, shuffle=True), None)

    def _in_step(self, batches: Iterator[Any], after: Consumed) -> Iterator[Batch]:
        batch, done = Batch(), after.batches
        while True:
            item = next(batches, None)
            # An empty batch counts: only None says that there are no more.
            batch = as_batch(item) if item is not None else replace(batch, local_count=0)
            counts = np.zeros(self._ranks.size + 1, np.int64)  # samples of each rank; whether any rank has more
            counts[self._ranks.rank], counts[-1] = batch.local_count, item is not None
            *of_ranks, going_on = self._ranks.allreduce(counts, name="samples_in_step").tolist()
            samples = sum(of_ranks)
            if not going_on:
                return
            done += self._ranks.size
            if samples:
                if batch.inputs is None and self._filler is not None:
                    rows = max(1, after.samples // max(1, after.batches))
                    with self.generators.aside():
                        batch = replace(as_batch(self._filler(rows)), local_count=0)
                # Indices of a shard are not those of the whole dataset.
                yield replace(batch, global_count=samples, largest=max(of_ranks), indices=None, done=done)


@contextmanager
def reading(batches: Iterator[Batch]) -> Iterator[Iterator[Batch]]:
    """Read batches; at the end of the block, also after an error, end what they have started, such as a thread."""
    try:
        yield batches
    finally:
        if isinstance(batches, Generator):
            batches.close()


def skip(items: Iterator[Any], count: int) -> None:
    """Read `count` items at once: what is random in their order is drawn now, and not when the next one is read."""
    next(islice(items, count, count), None)


def as_batch(item: Any, count: int | None = None) -> Batch:
    """Return an iterable's item as a Batch of this rank; `count` is the number of its samples, if known."""
    if isinstance(item, Batch):
        return item
    inputs, targets, weight = unpack(item)
    count = num_rows(inputs) if count is None else count
    return Batch(inputs, targets, weight, count, count, item=item)
