"""Process sets: subsets of the ranks. Horovod's own where it is installed, else the one set there can be."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from hvdtrain.keras import basics


class SoloProcessSet:
    """A process set in one process without Horovod: rank 0, or nobody."""

    process_set_id: int | None = None

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = sorted(ranks)

    def size(self) -> int:
        """Number of ranks in the set."""
        return len(self.ranks)

    def rank(self) -> int | None:
        """This process's number within the set; None outside it."""
        return 0 if self.included() else None

    def included(self) -> bool:
        """True if this process belongs to the set."""
        return self.ranks == [0]


_solo_global = SoloProcessSet([0])
_solo_global.process_set_id = 0


def _horovods() -> Any:
    """Return Horovod's module of process sets; None in one process without Horovod."""
    return None if basics.engine() is None else importlib.import_module("horovod.common.process_sets")


def process_set_class() -> Any:
    """Return Horovod's ProcessSet class, or the one-process form of it."""
    return getattr(_horovods(), "ProcessSet", SoloProcessSet)


def global_process_set() -> Any:
    """Return the set of all ranks."""
    return getattr(_horovods(), "global_process_set", _solo_global)


def add_process_set(process_set: Any) -> Any:
    """Register a set of ranks, equal on all ranks; see `horovod.add_process_set`."""
    if basics.running() is not None:
        return _horovods().add_process_set(process_set)
    if not isinstance(process_set, SoloProcessSet):
        process_set = SoloProcessSet(process_set)
    if process_set.ranks not in ([], [0]):
        raise ValueError(f"A process set may hold ranks in [0, 1) only. Received: {process_set.ranks}")
    process_set.process_set_id = 1
    return process_set


def remove_process_set(process_set: Any) -> bool:
    """Forget a registered set of ranks; returns False if it was not registered."""
    if basics.running() is not None:
        return bool(_horovods().remove_process_set(process_set))
    known = process_set.process_set_id is not None and process_set is not _solo_global
    process_set.process_set_id = None if known else process_set.process_set_id
    return known


def members(process_set: Any | None) -> int:
    """Return how many ranks a set has: 0 if this rank is not one of them; None means all ranks."""
    module = basics.running()
    if module is None:
        return 1 if process_set is None or process_set.included() else 0
    if process_set is None:
        return int(module.size())
    if process_set.process_set_id is None:
        raise ValueError(f"The process set is not registered. Call hvd.add_process_set first. Received: {process_set}")
    return int(process_set.size()) if process_set.included() else 0
