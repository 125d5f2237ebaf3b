"""A seed for each batch of a DataLoader's workers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from hvdtrain.data.generators import Generators


class BatchRequest(NamedTuple):
    """The indices of a batch's samples, and numbers that no other batch has together, to seed a worker with."""

    seeds: tuple[int, ...]
    indices: Any


class SeededBatches:
    """A DataLoader's (batch) sampler; workers seed each batch by its place, so a resumed run draws the same numbers.

    Attributes:
        dataset: what a DataLoader with this sampler reads.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._has_workers = loader.num_workers > 0
        seeded = self._has_workers
        self.dataset: Any = SeededDataset(loader.dataset, loader.collate_fn) if seeded else loader.dataset
        self._batches: Iterable[tuple[int, Any]] = ()
        self._seeds: tuple[int, ...] = ()

    def begin(self, batches: Iterable[tuple[int, Any]], *seeds: int) -> None:
        """Choose the next iteration's batches, each after its place among those of all ranks, and the epoch's seeds."""
        # Who seeds torch otherwise is to draw otherwise. A checkpoint holds this number.
        self._batches, self._seeds = batches, (torch.initial_seed(), *seeds)

    def __iter__(self) -> Iterator[Any]:
        seeds = self._seeds
        if not self._has_workers:
            return (indices for _, indices in self._batches)
        return (BatchRequest((*seeds, place), indices) for place, indices in self._batches)


class SeededDataset:
    """A user's dataset, which takes a `BatchRequest` too. In workers, `get_worker_info().dataset` is one."""

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        vars(self).update(_hvd_dataset=dataset, _hvd_collate_fn=collate_fn, _hvd_generators=None)

    def __getitems__(self, place: BatchRequest) -> Any:
        dataset = self._hvd_dataset
        self._hvd_seed(place.seeds)
        together = getattr(dataset, "__getitems__", None)
        return together(place.indices) if together else [dataset[index] for index in place.indices]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, BatchRequest):
            self._hvd_seed(index.seeds)
            index = index.indices
        return self._hvd_dataset[index]

    def __len__(self) -> int:
        return len(self._hvd_dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_hvd_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._hvd_dataset, name, value)

    def __reduce__(self) -> Any:
        return SeededDataset, (self._hvd_dataset, self._hvd_collate_fn)

    def _hvd_seed(self, numbers: tuple[int, ...]) -> None:
        """Seed what a worker seeds when it starts, and the generators of the data, of which each worker has a copy."""
        _seed(numbers)
        if self._hvd_generators is None:  # first in a worker, whose worker_init_fn may have given it others
            roots = {"dataset": self._hvd_dataset, "collate_fn": self._hvd_collate_fn}
            vars(self)["_hvd_generators"] = Generators(roots)
        self._hvd_generators.seed(numbers)


def _seed(numbers: tuple[int, ...]) -> None:
    """Seed what a worker seeds when it starts: torch's, Python's and NumPy's global generators."""
    first, second, third = np.random.SeedSequence(numbers).generate_state(3).tolist()
    torch.default_generator.manual_seed(first << 32 | second)  # torch.manual_seed looks for devices: 0.2 ms
    random.seed(first << 32 | second)
    np.random.seed(third)  # noqa: NPY002 - what users and their libraries draw from
