"""Which library moves the tensors: horovod.torch, or the one-process stand-in with the same primitives."""

from __future__ import annotations

import importlib
import itertools
from collections import defaultdict
from types import ModuleType
from typing import Any

from hvdtrain.distributed import world

# Horovod's own numbers for its reduction operations.
Average, Sum, Adasum, Min, Max, Product = range(6)

_module: ModuleType | None = None
_generation = 0
_counters: defaultdict[Any, itertools.count[int]] = defaultdict(itertools.count)


def native() -> Any:
    """Return horovod.torch, or `hvdtrain.torch.solo` in one process without Horovod; raises what `init` does."""
    global _module
    _module = _module or world.load_engine("torch") or importlib.import_module("hvdtrain.torch.solo")
    return _module


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Initialise Horovod for PyTorch; in one process without Horovod, stand alone.

    Args:
        comm: ranks or an mpi4py communicator to restrict the run to; None means all ranks.
        process_sets: list of `ProcessSet` to register, or "dynamic".

    Raises:
        HorovodMissingError: several processes were launched, but Horovod is not installed.
        HorovodMismatchError: it is installed, but built for other versions.
        LaunchError: the launcher announced more ranks than Horovod found.
    """
    fresh = not native().is_initialized()
    # world.init calls init() without arguments: pass on only what was given, so that both forms agree.
    given = {k: v for k, v in (("comm", comm), ("process_sets", process_sets)) if v is not None}
    if world.init_engine("torch", **given) is None:
        native().init(**given)
    if fresh:
        start_over()


def shutdown() -> None:
    """Leave the run; collectives raise until the next `init`."""
    native().shutdown()
    start_over()


def start_over() -> None:
    """Count unnamed operations from zero and forget handles of before; called where all ranks start together."""
    global _generation
    _generation += 1
    count_from_zero()


def generation() -> int:
    """Return a number that changes with every init and shutdown: older handles are invalid."""
    return _generation


def auto_name(kind: str, process_set: Any) -> str:
    """Return the next name for an unnamed operation.

    Horovod numbers unnamed operations by a counter that all operations of a process share; ranks that joined early, or
    that are outside a process set, count fewer, and the next unnamed operation of all ranks hangs. Here each process
    set counts for itself and `join` starts over.
    """
    key = process_set.process_set_id
    return f"hvdtrain.{kind}.{key}.{next(_counters[key])}"


def count_from_zero() -> None:
    """Count unnamed operations from zero again; called where all ranks are at one place, such as after `join`."""
    _counters.clear()


def global_set(process_set: Any = None) -> Any:
    """Return `process_set`, or the set of all ranks for None."""
    return native().global_process_set if process_set is None else process_set


def is_global(process_set: Any) -> bool:
    """True for the set of all ranks, the only one on which ranks can join."""
    return bool(process_set.process_set_id == 0)
