"""Which Horovod serves Keras's backend, and which rank this process is."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from hvdtrain.distributed import launch_environment, world
from hvdtrain.errors import HvdTrainError

# The values of Horovod's own constants, so that scripts that pass either kind agree, with Horovod installed or not.
Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5


def _framework() -> world.Framework:
    """Return which Horovod library serves Keras's backend: "torch" or "tensorflow"."""
    chosen = launch_environment.engine_for("keras")
    if chosen is None:
        raise HvdTrainError("Keras's JAX backend needs torch or tensorflow installed for Horovod. Install one of them.")
    return chosen


def engine() -> ModuleType | None:
    """Return `horovod.torch` or `horovod.tensorflow`; None in one process without Horovod."""
    return world.load_engine(_framework())


def running() -> ModuleType | None:
    """Return the initialised Horovod module; None in one process without Horovod.

    Raises:
        HvdTrainError: `init` was not called yet.
    """
    module = engine()
    if module is not None and not module.is_initialized():
        raise HvdTrainError("Horovod is not initialised on this process. Call hvd.init() before training starts.")
    return module


def init(*args: Any, **kwargs: Any) -> None:
    """Join the ranks that the launcher started. Call it before the model is made.

    Args:
        args: as `horovod.init` takes them: `comm` and `process_sets`.
        kwargs: likewise.
    """
    if not args and not kwargs:
        world.init("keras")
        return
    world.use(world.make(_framework(), *args, on_jax=launch_environment.runs_on_jax("keras"), **kwargs))


def shutdown() -> None:
    """Leave the ranks; `init` may be called again afterwards."""
    module = engine()
    if module is not None:
        module.shutdown()
    world.use(None)


def is_initialized() -> bool:
    """True between `init` and `shutdown`."""
    module = engine()
    if module is not None:
        return bool(module.is_initialized())
    try:
        world.current()
    except HvdTrainError:
        return False
    return True


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


def start_timeline(file_path: str, mark_cycles: bool = False) -> Any:
    """Write Horovod's timeline to `file_path`; does nothing in one process without Horovod, which sends nothing."""
    module = running()
    return None if module is None else module.start_timeline(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> Any:
    """Stop writing Horovod's timeline."""
    module = running()
    return None if module is None else module.stop_timeline()


def _query(function: str, meaning: str) -> Callable[[], bool]:
    """Return Horovod's `function`; without Horovod it returns False."""

    def ask() -> bool:
        module = engine()
        return module is not None and bool(getattr(module, function)())

    ask.__name__, ask.__doc__ = function, f"True if {meaning}."
    return ask


mpi_threads_supported = _query("mpi_threads_supported", "MPI may be called from several threads")
mpi_enabled = _query("mpi_enabled", "this run uses MPI")
mpi_built = _query("mpi_built", "Horovod was built with MPI")
gloo_enabled = _query("gloo_enabled", "this run uses Gloo")
gloo_built = _query("gloo_built", "Horovod was built with Gloo")
nccl_built = _query("nccl_built", "Horovod was built with NCCL")
ddl_built = _query("ddl_built", "Horovod was built with DDL")
ccl_built = _query("ccl_built", "Horovod was built with oneCCL")
cuda_built = _query("cuda_built", "Horovod was built with CUDA")
rocm_built = _query("rocm_built", "Horovod was built with ROCm")
