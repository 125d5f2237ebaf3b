"""Seed DataLoader workers for each batch, so that a resumed run repeats their random numbers.

A worker's generators advance with each batch. After a resume within an epoch, new workers would draw other numbers than
the earlier ones. So each batch begins with its own random states, whichever worker makes it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch


class BatchRequest(NamedTuple):
    """The indices of a batch's samples, and numbers that no other batch has together, to seed a worker with."""

    seeds: tuple[int, ...]
    indices: Any


class SeededBatches:
    """Says for each of a sampler's batches where it stands; a DataLoader takes it for a batch sampler, or a sampler."""

    def __init__(self, batches: Iterable[Any], dataset: Any) -> None:
        self.dataset: Any = _SeededDataset(dataset)
        self._batches = batches
        self._seeds: tuple[int, ...] = ()
        self._positions: Iterator[int] = iter(())

    def begin(self, positions: Iterator[int], *seeds: int) -> None:
        """Choose the seeds of the epoch, and the places of the next iteration's batches among those of all ranks."""
        # Who seeds torch otherwise is to draw otherwise. A checkpoint holds this number.
        self._seeds, self._positions = (torch.initial_seed(), *seeds), positions

    def __iter__(self) -> Iterator[BatchRequest]:
        seeds = self._seeds
        return (BatchRequest((*seeds, at), batch) for at, batch in zip(self._positions, self._batches, strict=False))

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


class _SeededDataset:
    """A user's dataset, which takes a `BatchRequest` too. In workers, `get_worker_info().dataset` is one."""

    def __init__(self, dataset: Any) -> None:
        vars(self)["_hvd_dataset"] = dataset

    def __getitems__(self, place: BatchRequest) -> Any:
        dataset = vars(self)["_hvd_dataset"]
        _seed(place.seeds)
        together = getattr(dataset, "__getitems__", None)
        return together(place.indices) if together else [dataset[index] for index in place.indices]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, BatchRequest):
            _seed(index.seeds)
            index = index.indices
        return vars(self)["_hvd_dataset"][index]

    def __len__(self) -> int:
        return len(vars(self)["_hvd_dataset"])

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_hvd_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_hvd_dataset"], name, value)

    def __reduce__(self) -> Any:
        return _SeededDataset, (vars(self)["_hvd_dataset"],)


def _seed(numbers: tuple[int, ...]) -> None:
    """Seed what a worker seeds when it starts: torch's, Python's and NumPy's global generators."""
    first, second, third = np.random.SeedSequence(numbers).generate_state(3).tolist()
    torch.default_generator.manual_seed(first << 32 | second)  # torch.manual_seed looks for devices: 0.2 ms
    random.seed(first << 32 | second)
    np.random.seed(third)  # noqa: NPY002 - what users and their libraries draw from
