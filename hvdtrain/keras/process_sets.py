"""Process sets: subsets of the ranks. Horovod's own where it is installed, else the one set there can be."""

from __future__ import annotations

import importlib
from typing import Any

from hvdtrain.distributed import solo_process_sets
from hvdtrain.keras import basics


def module() -> Any:
    """Return Horovod's module of process sets, or the one of the same names for one process without Horovod."""
    return solo_process_sets if basics.engine() is None else importlib.import_module("horovod.common.process_sets")


def add_process_set(process_set: Any) -> Any:
    """Register a set of ranks, equal on all ranks; see `horovod.add_process_set`."""
    basics.running()
    return module().add_process_set(process_set)


def remove_process_set(process_set: Any) -> bool:
    """Forget a registered set of ranks; returns False if it was not registered."""
    basics.running()
    return bool(module().remove_process_set(process_set))


def members(process_set: Any | None) -> int:
    """Return how many ranks a set has: 0 if this rank is not one of them; None means all ranks."""
    horovod = basics.running()
    if process_set is None:
        return 1 if horovod is None else int(horovod.size())
    if horovod is not None and process_set.process_set_id is None:
        raise ValueError(f"The process set is not registered. Call hvd.add_process_set first. Received: {process_set}")
    if not process_set.included():
        return 0
    return 1 if horovod is None else int(process_set.size())
