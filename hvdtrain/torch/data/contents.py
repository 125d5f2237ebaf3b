"""Read a few samples of a DataLoader's dataset, for the ranks to compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate, default_convert

from hvdtrain.data.contents import Leaves, leaves_of, read_here
from hvdtrain.data.generators import Generators
from hvdtrain.torch.data.draws import iterate
from hvdtrain.torch.data.seeded_batches import BatchRequest, SeededDataset


def read(loader: DataLoader[Any], indices: Sequence[int], generators: Generators) -> Iterator[Leaves | Exception]:
    """Yield the leaves of each sample, or the error that reading it raised.

    Samples are read where the loader reads. If that is in workers, a new worker reads them: a file that this process
    opened would be open in the workers, too, and many kinds of files do not bear that.
    """
    leaves_of_one = _LeavesOfOne(loader)
    if not loader.num_workers:
        fetch = getattr(loader.dataset, "__getitems__", None) or (lambda rows: [loader.dataset[row] for row in rows])
        yield from read_here(lambda index: leaves_of_one(fetch([index])), indices, generators)
        return
    dataset: Any = SeededDataset(loader.dataset, loader.collate_fn)
    requests: Any = [BatchRequest((index,), [index]) for index in indices]
    options: Any = {name: getattr(loader, name) for name in ("multiprocessing_context", "timeout", "worker_init_fn")}
    # A loader draws a seed for its workers, from the global generator if it has none of its own.
    options |= {"batch_sampler": requests, "collate_fn": leaves_of_one, "generator": torch.Generator()}
    samples = iterate(DataLoader(dataset, num_workers=1, **options))
    for _ in indices:
        try:
            yield next(samples)
        except Exception as error:  # noqa: BLE001 - ranks compare it: whatever it is, they must not wait
            yield error.with_traceback(None)  # which would keep the workers alive


class _LeavesOfOne:
    """A collate function that returns the leaves of a single sample, and of the batch that the loader makes of it."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        is_torchs = loader.collate_fn in (default_collate, default_convert)
        self._collate_fn = None if is_torchs else loader.collate_fn
        self._takes_samples = loader.batch_sampler is not None

    def __call__(self, samples: list[Any]) -> Leaves:
        found = leaves_of(samples[0])
        if self._collate_fn is None:
            return found
        try:
            batch = self._collate_fn(samples if self._takes_samples else samples[0])
        except Exception as error:  # noqa: BLE001 - it may need several samples
            batch = type(error).__name__
        return found | leaves_of(batch, "collate_fn(...)")
