"""Say, once a loader, where a DataLoader's workers do what one process would not: these are limits of torch."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from hvdtrain.data.generators import is_stream, reached
from hvdtrain.data.trees import as_array, crc32, leaves, num_rows, unpack

log = logging.getLogger("hvdtrain")

_said: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # by loader


def warn_of_stale_epochs(loader: Any) -> None:
    """Warn if the dataset of a DataLoader has a `set_epoch` that its workers never see."""
    if not getattr(loader, "persistent_workers", False) or not hasattr(loader.dataset, "set_epoch"):
        return
    if any(_is_shared(value) for _, value in reached({"dataset": loader.dataset})):  # perhaps the epoch
        return
    _say_once(
        loader,
        "set_epoch",
        f"persistent_workers: a call of {type(loader.dataset).__name__}.set_epoch does not reach the workers, which "
        "hold copies of the dataset: each epoch may have the order of the first. Use persistent_workers=False, or hold "
        "the epoch in shared memory: torch.zeros((), dtype=torch.int64).share_memory_()",
    )


def _is_shared(value: Any) -> bool:
    """Return whether processes share this object's memory."""
    if type(value).__module__.startswith("multiprocessing.") or hasattr(value, "_wrapper"):  # the latter: a RawValue
        return True
    is_shared = getattr(type(value), "is_shared", None)  # a tensor's
    return bool(callable(is_shared) and value.is_shared())


class RepeatedSamples:
    """Warns if all workers of a DataLoader over an iterable dataset yield the same samples.

    Args:
        loader: the DataLoader.
        is_root: True on the rank that logs.
    """

    def __init__(self, loader: Any, *, is_root: bool) -> None:
        self._loader = loader
        self._is_due = is_root and is_stream(loader.dataset) and loader.num_workers > 1

    def watch(self, items: Iterator[Any]) -> Iterator[Any]:
        """Return what the loader yields; the first epoch is compared on the way."""
        if not self._is_due:
            return items
        self._is_due = False
        return self._compared(items)

    def _compared(self, items: Iterator[Any]) -> Iterator[Any]:
        workers, length = self._loader.num_workers, _length(self._loader.dataset)
        first: list[int] = []  # of the first worker's first batch
        is_same = getattr(self._loader, "in_order", True)  # then workers take turns
        taken = samples = 0
        for item in items:
            own = _digests(item) if is_same else []
            if not taken:
                first, is_same = own, bool(own)
            elif taken < workers:
                is_same = is_same and own == first
            elif is_same:  # in the data of a benchmark, all batches are the same
                is_same = False
                if own != first:
                    self._warn(f"its {workers} workers yielded the same first batch")
            taken, samples = taken + 1, samples + (num_rows(unpack(item)[0]) if length else 0)
            yield item
        if is_same and taken == workers and len(set(first)) > 1:  # the epoch has no other batch to compare
            self._warn(f"its {workers} workers yielded the same batch")
        if length and samples == workers * length:
            self._warn(f"its {workers} workers yielded {samples} samples of {length}")

    def _warn(self, found: str) -> None:
        _say_once(
            self._loader,
            "samples",
            f"{type(self._loader.dataset).__name__}: {found}. Each of them iterates the whole dataset, or draws from a "
            f"copy of one generator, so that an epoch has each sample {self._loader.num_workers} times. Let __iter__ "
            "yield another part in each worker (torch.utils.data.get_worker_info), or use num_workers=1",
        )


def _digests(item: Any) -> list[int]:
    """Return a number for each sample of what a loader yields, equal for equal samples; [] if that fails."""
    try:
        columns = [np.atleast_1d(as_array(leaf)) for leaf in leaves(item)]
    except (RuntimeError, TypeError, ValueError):  # a sparse tensor
        return []
    rows = zip(*columns, strict=False)
    return [zlib.crc32(repr([crc32(np.asarray(value)) for value in row]).encode()) for row in rows]


def _length(dataset: Any) -> int:
    """Return the number of samples; 0 if it is unknown."""
    try:
        return len(dataset)
    except (AttributeError, NotImplementedError, TypeError):
        return 0


def _say_once(loader: Any, what: str, line: str) -> None:
    said = _said.setdefault(loader, set())
    if what not in said:
        said.add(what)
        log.warning("%s", line)
