"""The batches of a DataLoader, shared out over ranks: each sample once an epoch, in one order for all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from hvdtrain.data.contents import Contents, compare, subsets
from hvdtrain.data.generators import generators_of, is_stream
from hvdtrain.distributed.agreement import everywhere, require_equal
from hvdtrain.distributed.world import World
from hvdtrain.torch.data.contents import read
from hvdtrain.torch.ops.functions import broadcast_object

_SAME = "Give all ranks the same data: ranks share it out among themselves."


class RankBatches:
    """A batch sampler that yields this rank's batches of another one's: batch rank, rank + size, and so on.

    One step of all ranks is what one process would take in a batch that is `size` times as long. Rank 0's order counts.
    In an epoch's last step a rank may be without a batch; it gets one sample of the step, to be counted as none.

    Attributes:
        is_absent: True if this rank has no batch in the last step.
    """

    def __init__(self, batches: Any, *, rank: int, size: int, seed: int) -> None:
        self.batch_sampler = batches
        self.batch_size = getattr(batches, "batch_size", None)
        self.drop_last = bool(getattr(batches, "drop_last", False))
        self._rank, self._size, self._seed = rank, size, seed
        self._generator: torch.Generator | None = None
        rest = len(batches) % size
        self.is_absent = not self.drop_last and 0 < rest <= rank

    @property
    def sampler(self) -> Any:
        """The sampler of single samples, which accelerate replaces by one with a seed."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order. A sampler that would draw from global generators gets its own."""
        for each in (self.batch_sampler, self.sampler):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
                return
        if getattr(self.sampler, "generator", self) in (None, self._generator):
            self._generator = self.sampler.generator = torch.Generator().manual_seed(self._seed + epoch)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.batch_sampler), self._size)
        return whole + int(rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        is_root = self._rank == 0
        own = list(islice(self.batch_sampler, len(self.batch_sampler))) if is_root else None
        batches = broadcast_object(own, 0, "transformers.order")
        for first in range(0, self._size * len(self), self._size):
            place = first + self._rank
            yield batches[place] if place < len(batches) else batches[first][:1]


def find(loader: Any) -> RankBatches | None:
    """Return the RankBatches that a DataLoader reads by, also after some were skipped; None if it has none."""
    found = getattr(loader, "batch_sampler", None)
    while found is not None and not isinstance(found, RankBatches):
        found = getattr(found, "batch_sampler", None)
    return found


def share_out(loader: DataLoader[Any], world: World, seed: int) -> Any:
    """Return the DataLoader with this rank's batches. A collective; data that ranks cannot share are refused on all.

    Raises:
        ValueError: an iterable dataset, or samples without batches.
        DesyncError: ranks have other data.
    """
    with everywhere(world=world, name="transformers.data"):
        if is_stream(loader.dataset):
            raise ValueError(
                "Ranks cannot share an IterableDataset exactly. Received: "
                f"{type(loader.dataset).__name__} on rank {world.rank}. Use a dataset with a length, such as datasets' "
                "load_dataset without streaming, or hvdtrain.Trainer, which takes streams."
            )
        if loader.batch_sampler is None:
            raise ValueError(f"A DataLoader needs batches to share out. Received: batch_size=None on rank {world.rank}")
        facts = {"samples": len(loader.dataset), "batches": len(loader.batch_sampler)}  # type: ignore[arg-type]
    require_equal(facts, world=world, what="the data", advice=_SAME)
    generators = generators_of(loader, replays=False, is_root=world.is_root)
    contents = Contents(loader, facts["samples"], partial(read, loader), partial(subsets, loader.dataset))
    compare(contents if facts["samples"] else None, generators, world=world, what="data", advice=_SAME)
    batches = RankBatches(loader.batch_sampler, rank=world.rank, size=world.size, seed=seed)
    shared = object.__new__(type(loader))  # torch lets nobody replace the batch sampler of a loader
    shared.__dict__.update(loader.__dict__, batch_sampler=batches)
    return shared
