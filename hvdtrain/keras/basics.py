"""Which Horovod serves Keras's backend, which rank this process is, and which sets of ranks there are."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from hvdtrain.distributed import launch_environment, solo_process_sets, world
from hvdtrain.errors import HvdTrainError

__all__ = [
    "Adasum", "Average", "Max", "Min", "Product", "Sum", "cross_rank", "cross_size", "init", "is_initialized",
    "local_rank", "local_size", "rank", "shutdown", "size",
]  # fmt: skip

# Horovod's own values, so that scripts may pass either kind, with Horovod installed or not.
Average, Sum, Adasum, Min, Max, Product = range(6)


def engine() -> ModuleType | None:
    """Return `horovod.torch` or `horovod.tensorflow`; None in one process without Horovod."""
    return world.load_engine(launch_environment.engine_for("keras") or "tensorflow")


def running() -> ModuleType | None:
    """Return the initialised Horovod module; None in one process without Horovod."""
    module = engine()
    if module is not None and not module.is_initialized():
        raise HvdTrainError("Horovod is not initialised on this process. Call hvd.init() before training starts.")
    return module


def init(*args: Any, **kwargs: Any) -> None:
    """Join the ranks that the launcher started. Call it before the model is made.

    Arguments are those of `horovod.init`: `comm` and `process_sets`.
    """
    if args or kwargs:
        framework, on_jax = launch_environment.engine_for("keras"), launch_environment.runs_on_jax("keras")
        world.use(world.make(framework, *args, on_jax=on_jax, **kwargs))
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


def cross_rank() -> int:
    """This host's number among the hosts."""
    module = running()
    return 0 if module is None else int(module.cross_rank())


def cross_size() -> int:
    """Number of hosts that have this local rank."""
    module = running()
    return 1 if module is None else int(module.cross_size())


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
