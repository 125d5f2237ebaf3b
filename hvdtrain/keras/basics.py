"""The Horovod that serves Keras's backend, this process's rank, and sets of ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hvdtrain.distributed import launch_environment, solo_process_sets, world
from hvdtrain.errors import HvdTrainError, NotInitializedError

__all__ = [
    "Adasum", "Average", "Max", "Min", "Product", "Sum", "add_process_set", "ccl_built", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "init", "is_initialized", "local_rank", "local_size",
    "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank", "remove_process_set", "rocm_built",
    "shutdown", "size", "start_timeline", "stop_timeline",
]  # fmt: skip

# Horovod's own values, so that scripts may pass either kind, with Horovod installed or not.
Average, Sum, Adasum, Min, Max, Product = range(6)


def engine() -> ModuleType | None:
    """Return `horovod.torch` or `horovod.tensorflow`; None in one process without Horovod."""
    return world.load_engine(_framework())


def _framework() -> world.Framework:
    """Return which Horovod library serves Keras's backend."""
    chosen = launch_environment.engine_for("keras")
    if chosen is None:
        raise HvdTrainError("Keras's JAX backend needs torch or tensorflow installed for Horovod. Install one of them.")
    return chosen


def running() -> ModuleType | None:
    """Return the initialised Horovod module; None in one process without Horovod."""
    module = engine()
    if module is not None and not module.is_initialized():
        raise NotInitializedError
    return module


def init(*args: Any, **kwargs: Any) -> None:
    """Join the ranks that the launcher started. Call it before the model is made.

    Arguments are those of `horovod.init`: `comm` and `process_sets`.
    """
    if args or kwargs:
        world.use(world.make(_framework(), *args, on_jax=launch_environment.runs_on_jax("keras"), **kwargs))
    else:
        world.init("keras")


def shutdown() -> None:
    """Leave the ranks; `init` may be called again afterwards."""
    module = engine()
    if module is not None:
        module.shutdown()
    world.use(None)


def is_initialized() -> bool:
    """True between `init` and `shutdown`."""
    module = engine()
    return world._world is not None if module is None else bool(module.is_initialized())


def rank() -> int:
    """This process's number, in [0, size())."""
    return world.current().rank


def size() -> int:
    """Number of ranks."""
    return world.current().size


def local_rank() -> int:
    """This process's number among those on its host."""
    return world.current().local_rank


def local_size() -> int:
    """Number of ranks on this host."""
    return world.current().local_size


def has_small_hosts() -> bool:
    """True if no host has more than two ranks, or one host has all; equal on all ranks."""
    module = running()
    if module is None or size() == local_size():
        return True
    native: Any = importlib.import_module(f"{module.__name__}.mpi_ops")  # horovod.torch itself lacks the name
    return bool(native.is_homogeneous()) and local_size() <= 2


def cross_rank() -> int:
    """This host's number among the hosts."""
    module = running()
    return 0 if module is None else int(module.cross_rank())


def cross_size() -> int:
    """Number of hosts that have this local rank."""
    module = running()
    return 1 if module is None else int(module.cross_size())


def start_timeline(file_path: str, mark_cycles: bool = False) -> Any:
    """Write Horovod's timeline to `file_path`; does nothing in one process without Horovod, which sends nothing."""
    module = running()
    return None if module is None else module.start_timeline(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> Any:
    """Stop writing Horovod's timeline."""
    module = running()
    return None if module is None else module.stop_timeline()


def _query(function: str) -> Callable[[], bool]:
    """Return Horovod's `function`; without Horovod it returns False."""

    def ask() -> bool:
        module = engine()
        return module is not None and bool(getattr(module, function)())

    ask.__name__, ask.__doc__ = function, "True if Horovod has this, was built with it, or uses it in this run."
    return ask


mpi_threads_supported, mpi_enabled, mpi_built = map(_query, ("mpi_threads_supported", "mpi_enabled", "mpi_built"))
gloo_enabled, gloo_built, nccl_built = map(_query, ("gloo_enabled", "gloo_built", "nccl_built"))
ddl_built, ccl_built, cuda_built, rocm_built = map(_query, ("ddl_built", "ccl_built", "cuda_built", "rocm_built"))


def add_process_set(process_set: Any) -> Any:
    """Register a set of ranks, equal on all ranks; see `horovod.add_process_set`."""
    running()
    return process_sets().add_process_set(process_set)


def remove_process_set(process_set: Any) -> bool:
    """Forget a registered set of ranks; returns False if it was not registered."""
    running()
    return bool(process_sets().remove_process_set(process_set))


def process_sets() -> Any:
    """Return Horovod's module of process sets, or its stand-in in one process without Horovod."""
    return solo_process_sets if engine() is None else importlib.import_module("horovod.common.process_sets")


def members(process_set: Any | None) -> int:
    """Return how many ranks a set has: 0 if this rank is not one of them; None means all ranks."""
    module = running()
    if module is None:
        return int(process_set is None or process_set.included())
    if process_set is None:
        return int(module.size())
    if process_set.process_set_id is None:
        raise ValueError(f"The process set is not registered. Call hvd.add_process_set first. Received: {process_set}")
    return int(process_set.size()) if process_set.included() else 0
