"""torch DataLoaders and samplers, shared out over ranks, with a seed for each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from functools import partial
from itertools import count, islice, tee
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from hvdtrain.data import sharding
from hvdtrain.data.contents import Contents, subsets
from hvdtrain.data.generators import Generators
from hvdtrain.data.plan import Part, Plan
from hvdtrain.data.sources import (
    NOTHING,
    Batch,
    Consumed,
    IteratedSource,
    NoSamples,
    Source,
    Start,
    as_batch,
    skip,
)
from hvdtrain.data.trees import unpack
from hvdtrain.data.workers import RepeatedSamples
from hvdtrain.distributed import streams
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import World, current
from hvdtrain.torch.data.contents import read
from hvdtrain.torch.data.draws import iterate, sampling
from hvdtrain.torch.data.seeded_batches import SeededBatches

_NOT_OF_ORDER = (
    "collate_fn", "generator", "multiprocessing_context", "num_workers", "persistent_workers", "pin_memory",
    "prefetch_factor", "timeout", "worker_init_fn",
)  # fmt: skip


class ShardSampler(Sampler[int]):
    """This rank's sample indices of an epoch: every sample on exactly one rank, shuffled by (seed, epoch).

    Call `set_epoch` before each epoch, or every epoch has the order of epoch 0. `drop_last` leaves out the samples at
    the end that do not fill a batch of `batch_size` on every rank. `seed` must be equal on all ranks.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        batch_size: int | None = None,
        world: World | None = None,
    ) -> None:
        self._ranks = DataRanks(world or current())
        self._total = self.num_samples = dataset if isinstance(dataset, int) else len(dataset)  # over all ranks
        if drop_last:
            if batch_size is None:
                raise ValueError("drop_last needs batch_size, in samples per rank. Received: batch_size=None")
            self.num_samples -= self._total % (batch_size * self._ranks.size)
        self.shuffle, self.seed = shuffle, seed
        self._epoch, self._start = 0, 0

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Choose the epoch whose order the next iteration has, and how many samples of it are done, over all ranks."""
        self._epoch, self._start = epoch, start

    def __iter__(self) -> Iterator[int]:
        # What drop_last leaves out stands at the end of the order of all samples.
        return iter(sharding.Shard(self.order(), self._positions()))

    def __len__(self) -> int:
        return len(self._positions())

    def _positions(self) -> range:
        return range(self._start + self._ranks.rank, self.num_samples, self._ranks.size)

    def order(self) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
        """Return the function from positions in the epoch to samples."""
        return sharding.EpochOrder(self._total, epoch=self._epoch, seed=self.seed, shuffle=self.shuffle).at


class _SharedOrder(ShardSampler):
    """Shards the order of a user's own sampler: rank 0's, since a sampler may draw at random on each rank."""

    def __init__(self, sampler: Any, **options: Any) -> None:
        super().__init__(len(sampler), **options)
        self._sampler = sampler

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Draw the epoch's order now, so that what is random in it does not depend on when a batch is fetched."""
        super().set_epoch(epoch, start=start)
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        with sampling(self._sampler):
            drawn = np.fromiter(self._sampler, np.int64, self._total)
        self._drawn = self._ranks.world.broadcast(drawn, name="sampler")

    def order(self) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
        """Return the function from positions in the epoch to samples."""
        return self._drawn.__getitem__


def _shard_sampler(loader: DataLoader[Any], world: World, seed: int) -> ShardSampler:
    """Return this rank's sampler: it shuffles by (seed, epoch), or not, as torch's do; any other draws on rank 0."""
    given: Any = loader.sampler
    if hasattr(given, "num_replicas") and not isinstance(given, DistributedSampler):
        raise TypeError(
            f"{type(given).__name__} gives each rank its own part. Received: a DataLoader with this sampler, on "
            f"rank {world.rank}. Use a plain DataLoader, or hvdtrain.Sharded(loader) to use the parts as they are."
        )
    shards, draws = isinstance(given, DistributedSampler | ShardSampler), isinstance(given, RandomSampler)
    options: dict[str, Any] = {"drop_last": loader.drop_last, "batch_size": loader.batch_size, "world": world}
    options["shuffle"] = given.shuffle if shards else draws
    options["seed"] = given.seed if isinstance(given, ShardSampler) else seed
    once = draws and not given.replacement and given._num_samples is None
    plain = shards or once or isinstance(given, SequentialSampler)
    return ShardSampler(loader.dataset, **options) if plain else _SharedOrder(given, **options)  # type: ignore[arg-type]


def _like(loader: DataLoader[Any], **order: Any) -> DataLoader[Any]:
    """Return a DataLoader over the same dataset with the same workers and collation, in another order."""
    dataset = next((each.dataset for each in order.values() if isinstance(each, SeededBatches)), loader.dataset)
    return DataLoader(dataset, **{name: getattr(loader, name) for name in _NOT_OF_ORDER}, **order)


class LoaderSource:
    """A DataLoader over a map-style dataset: steps by index arithmetic, batches by the loader and its workers."""

    shares: Sequence[int] | None = None
    contents: Contents | None = None

    def __init__(self, loader: DataLoader[Any], *, ranks: DataRanks, seed: int) -> None:
        self._ranks, self._given = ranks, loader
        self.generators = Generators({})
        self._sampler = _shard_sampler(loader, ranks.world, seed)
        self._batch_size = batch_size = int(loader.batch_size or 1)
        self._batches = SeededBatches(loader)
        self._loader = _like(loader, batch_sampler=self._batches)
        num_samples = self._sampler.num_samples
        if not num_samples:
            raise ValueError(
                f"drop_last leaves no samples. Received: {len(loader.dataset)} samples, batch_size={batch_size} "  # type: ignore[arg-type]
                f"and {ranks.size} ranks"
            )
        self.steps: int | None = sharding.steps_per_epoch(num_samples, batch_size=batch_size, size=ranks.size)
        self.facts: dict[str, Any] = {"number of samples": num_samples, "batch_size": batch_size}
        self.facts |= {"seed": self._sampler.seed, "shuffle": self._sampler.shuffle}

    def epoch(self, epoch: int, *, shuffle: bool, after: Consumed = NOTHING) -> Iterator[Batch]:
        """Return batches; whether they are shuffled, the user's DataLoader says."""
        self._sampler.set_epoch(epoch)
        return self.rest(epoch, after)

    def rest(self, epoch: int, after: Consumed) -> Iterator[Batch]:
        """Return batches of the rest of the epoch in the order that `epoch` has drawn."""
        order, rank, size = self._sampler.order(), self._ranks.rank, self._ranks.size
        how: dict[str, Any] = {"batch_size": self._batch_size, "rank": rank, "size": size, "shares": self.shares}
        plan = Plan(order, self._sampler.num_samples, start=after.samples, assignment=after.assignment, **how)
        parts, ahead = tee(plan)  # workers read ahead
        batches = ((part.position, part.indices.tolist()) for part in ahead if len(part.indices))
        self._batches.begin(batches, self._sampler.seed, epoch)
        if not plan.is_equal:
            loader = _like(self._loader, batch_sampler=self._batches)  # its workers end with the iteration
            return self._fetch(parts, iterate(loader), order(np.zeros(1, np.int64)).tolist())
        before = order(np.array(range(rank, after.samples, size)[-self._batch_size :], np.int64)).tolist()
        return self._fetch(parts, iterate(self._loader), before or [0] * (after.samples > 0))

    def in_order(self) -> Iterator[Batch]:
        """Return batches of all samples: neither shuffled, nor with `drop_last`."""
        if isinstance(self._sampler, _SharedOrder):
            raise TypeError(
                "predict takes each sample of a dataset once. Received: a DataLoader with a sampler of its own, "
                f"{type(self._given.sampler).__name__}, on rank {self._ranks.world.rank}. Use a DataLoader without "
                "sampler; for some of the samples, one over torch.utils.data.Subset(dataset, indices)."
            )
        plain = _like(self._given, batch_size=self._batch_size)
        return LoaderSource(plain, ranks=self._ranks, seed=self._sampler.seed).epoch(0, shuffle=False)

    def example(self, epoch: int) -> Batch | None:
        """Return the epoch's first batch: the sampler knows epochs by their number."""
        return next(self.epoch(epoch, shuffle=True), None)

    def _fetch(self, parts: Iterator[Part], items: Iterator[Any], filler: list[int]) -> Iterator[Batch]:
        """Read the parts; a rank that has had no samples yet reads those of `filler`, if there are any."""
        item: Any = None
        for part in parts:
            if len(part.indices):
                item = self._next(items)
            elif item is None and filler:
                with self.generators.aside():
                    item = self._given.collate_fn([self._given.dataset[row] for row in filler])
            counts = len(part.indices), part.global_count
            yield Batch(*unpack(item), *counts, part.indices, item=item, largest=part.largest)

    def _next(self, batches: Iterator[Any]) -> Any:
        try:
            return next(batches)
        except RuntimeError as error:
            if "stack expects each tensor to be equal size" not in str(error):
                raise
            raise ValueError(
                f"The samples of a batch must have equal shapes. Received on rank {self._ranks.world.rank}: {error}. "
                "Pad them to one length in the dataset, or give the DataLoader a collate_fn that pads a batch."
            ) from error


def as_source(data: Any, *, batch_size: int, ranks: DataRanks, seed: int) -> Source | None:
    """Return the source for torch's own kinds of data; None for a map-style dataset, which `data.sources` reads."""
    if isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=batch_size)
    if not isinstance(data, DataLoader):
        return None
    if isinstance(data.dataset, IterableDataset):
        return IteratedSource(_every_size_th(data, ranks), ranks=ranks, replays=True)
    if not len(data.sampler):  # type: ignore[arg-type]
        raise NoSamples("a DataLoader of no samples")
    source: LoaderSource | IteratedSource
    if data.batch_size is None:  # a batch_sampler of the user's own
        source = IteratedSource(lambda epoch, _, after: _own_batches(data, epoch, after, ranks, seed), ranks=ranks)
    else:
        source = LoaderSource(data, ranks=ranks, seed=seed)
    if isinstance(data.dataset, Sized):
        source.contents = Contents(data, len(data.dataset), partial(read, data), partial(subsets, data.dataset))
    return source


def _own_batches(loader: DataLoader[Any], epoch: int, after: Consumed, ranks: DataRanks, seed: int) -> Iterator[Any]:
    """Share out the batches that a user's batch_sampler makes on rank 0: it may draw at random on each rank."""
    sampler: Any = loader.batch_sampler or loader.sampler
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    with sampling(sampler):
        drawn = [np.asarray(batch).tolist() for batch in sampler]
    batches = ranks.world.broadcast_object(drawn, name="batch_sampler")
    mine = batches[after.batches + ranks.rank :: ranks.size]
    counts = [len(rows) if isinstance(rows, list) else None for rows in mine]
    order = SeededBatches(loader)
    order.begin(zip(count(after.batches + ranks.rank, ranks.size), mine, strict=False), seed, epoch)
    how = {"batch_sampler": order} if loader.batch_sampler else {"batch_size": None, "sampler": order}
    return map(as_batch, iterate(_like(loader, **how)), counts)


def _every_size_th(loader: DataLoader[Any], ranks: DataRanks) -> Start:
    """Keep every size-th of the batches that each rank iterates: they must come in the same order on all of them."""
    repeated = RepeatedSamples(loader, is_root=ranks.world.is_root)
    torchs = (torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed)

    def start(epoch: int, shuffle: bool, after: Consumed) -> Iterator[Any]:
        def rest() -> Iterator[Any]:
            if hasattr(loader.dataset, "set_epoch"):
                loader.dataset.set_epoch(epoch)
            # Without workers, the data's own code may run here, and finds the default device as it is.
            is_plain = not loader.num_workers and loader.generator is None
            items = repeated.watch(iter(loader) if is_plain else iterate(loader))
            first = after.batches + ranks.rank
            read = max(0, first - ranks.size + 1) if after.batches else 0  # as many as this rank had read
            skip(items, read)
            return islice(items, first - read, None, ranks.size)

        return streams.draw_alike(rest, epoch=epoch, generators=[torchs])

    return start
