"""World: this process's rank, and collectives on host arrays that everything else uses.

One process has one World and one engine. `horovod.torch` and `horovod.tensorflow` are two native libraries with
separate state. The first framework that is used decides which is loaded; a second is refused, since it would hang.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
import os
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hvdtrain.distributed import devices, frameworks, gpu_path, launch_environment, tuning, watchdog
from hvdtrain.distributed.recorder import recorder
from hvdtrain.errors import (
    EngineConflictError,
    HorovodMismatchError,
    HorovodMissingError,
    HvdTrainError,
    LaunchError,
    NotInitializedError,
)
from hvdtrain.horovod_build import installed, other_hosts

log = logging.getLogger("hvdtrain")

Framework = launch_environment.Engine
Op = Literal["sum", "mean", "min", "max"]
Pick = Callable[[int], str]  # makes a local rank's device the current one, and returns its name
Array = NDArray[Any]

FORK_PAUSE_S = 0.01  # long enough for a thread that was just preempted to run again on a busy machine

# Horovod's numbers. A mean is a sum that is divided here: exact for integers too, and one native operation less.
_OPS = {"sum": 1, "mean": 1, "min": 3, "max": 4}

_world: World | None = None
_loaded: dict[str, ModuleType] = {}


class World:
    """This process's rank in the job that a launcher started, with collectives on host (NumPy) arrays.

    Every rank must call the same collectives in the same order. Messages about stalls show `name`, so let it say what
    the call is for. `SoloWorld` is one process alone.

    Attributes:
        engine: the framework of the Horovod library, "torch" or "tensorflow"; "solo" without Horovod.
        device: the device this rank computes on: "cpu" or "cuda:<local rank>".
        seed: default seed of the order of samples.
        data_set: the process set of Horovod's over which this rank's replicas divide the data; None for all ranks.
            `DataRanks` are these.
        part_set: the process set of the ranks that hold the same part of the model; None for all ranks, which then have
            it whole. `PartRanks` are these.
        grid: the `hvdtrain.torch.Grid` that divides the model; None if each rank has it whole.
    """

    seed: int | None = None
    data_set: Any = None
    part_set: Any = None
    grid: Any = None

    def __init__(self, engine: str, horovod: ModuleType, device: str) -> None:
        self.engine = engine
        self.device = device
        self._horovod = horovod
        self._host: tuning.Host = frameworks.load(engine, "collectives")

    @recorder.waiting()
    def _run(self, kind: str, array: Array, *args: Any, process_set: Any = None, **options: Any) -> Array:
        devices.compare_once()
        if process_set is not None:  # Horovod's own default stands for all ranks
            options["process_set"] = process_set
        return np.asarray(self._host.run(self._horovod, kind, array, *args, **options))

    # Read from Horovod each time: an elastic job renumbers ranks, grows and shrinks.

    @property
    def rank(self) -> int:
        """This process's number, in [0, size)."""
        return int(self._horovod.rank())

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self._horovod.size())

    @property
    def local_rank(self) -> int:
        """This process's number among those on its host."""
        return int(self._horovod.local_rank())

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        return int(self._horovod.local_size())

    @property
    def is_root(self) -> bool:
        """True on rank 0. Under it there is I/O only, never a collective."""
        return self.rank == 0

    # With a `process_set` of Horovod's, a collective is one of its ranks, and the others do not call it.

    def allreduce(self, array: Array, op: Op = "sum", *, name: str = "host", process_set: Any = None) -> Array:
        """Reduce `array` over ranks, elementwise; shape and dtype must be equal on all of them.

        Raises:
            ValueError: another op; booleans, and integers but int32 and int64, which Horovod does not add up.
        """
        if op not in _OPS:
            raise ValueError(f'op must be "sum", "mean", "min" or "max". Received: op={op!r}')
        array = np.asarray(array, order="C")
        if array.dtype.kind in "biu" and array.dtype not in (np.int32, np.int64):
            raise ValueError(
                f"allreduce of integers takes int32 or int64. Received: {array.dtype} on rank {self.rank}. Convert it: "
                "array.astype(np.int64)."
            )
        how = {"op": _OPS[op], "name": f"hvdtrain.{name}.{op}", "process_set": process_set}
        total = self._run("allreduce", array, **how)
        size = self.size if process_set is None else process_set.size()
        return total / size if op == "mean" else total

    def allgather(self, array: Array, *, name: str = "host", process_set: Any = None) -> Array:
        """Concatenate every rank's `array` on axis 0, in rank order; only axis 0 may differ in length."""
        array = np.asarray(array, order="C")
        if array.ndim == 0:
            raise ValueError(f"allgather needs an array with an axis 0. Received: {array!r}")
        # As bytes, so that any dtype arrives bit for bit.
        rows = array.reshape(len(array), -1).view(np.uint8) if array.size else np.zeros((0, 1), np.uint8)
        flat = self._run("allgather", rows.reshape(-1), name=f"hvdtrain.{name}.allgather", process_set=process_set)
        return flat.view(array.dtype).reshape(-1, *array.shape[1:])

    def broadcast(self, array: Array, *, root: int = 0, name: str = "host") -> Array:
        """Return the root's `array`; shape and dtype must be equal on all ranks."""
        if not 0 <= root < self.size:
            raise ValueError(f"root must be a rank in [0, {self.size}). Received: root={root}")
        array = np.asarray(array, order="C")
        flat = self._run("broadcast", array.reshape(-1).view(np.uint8), root, name=f"hvdtrain.{name}")
        return flat.view(array.dtype).reshape(array.shape)

    def allgather_bytes(self, data: bytes, *, name: str, process_set: Any = None) -> list[bytes]:
        """Return every rank's bytes, in rank order; lengths may differ."""
        length, content = np.array([len(data)], np.int64), np.frombuffer(data, np.uint8)
        lengths = self.allgather(length, name=f"{name}.length", process_set=process_set)
        gathered = self.allgather(content, name=f"{name}.bytes", process_set=process_set).tobytes()
        return [gathered[end - n : end] for n, end in zip(lengths, np.cumsum(lengths), strict=True)]

    def allgather_object(self, obj: Any, *, name: str = "object", process_set: Any = None) -> list[Any]:
        """Return every rank's JSON value, in rank order. JSON, so that nothing received is ever unpickled."""
        everyones = self.allgather_bytes(json.dumps(obj).encode(), name=name, process_set=process_set)
        return [json.loads(data) for data in everyones]

    def broadcast_object(self, obj: Any, *, root: int = 0, name: str = "object") -> Any:
        """Return the root's JSON value on every rank."""
        # An allgather in which the other ranks send nothing: so ranks need not know the length before.
        data = np.frombuffer(json.dumps(obj).encode() if self.rank == root else b"", np.uint8)
        return json.loads(self.allgather(data, name=f"{name}.bytes").tobytes())

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.allreduce(np.zeros(1, np.float32), name="barrier")

    def start_timeline(self, path: os.PathLike[str]) -> Callable[[], None] | None:
        """Write Horovod's timeline of all ranks to a file, on rank 0, if HOROVOD_TIMELINE is DYNAMIC.

        Returns:
            A function that ends it, or None where nothing is written.
        """
        # One rank has no communication, and an empty file is no JSON.
        if not self.is_root or self.size == 1 or os.environ.get("HOROVOD_TIMELINE") != "DYNAMIC":
            return None
        try:
            self._horovod.start_timeline(os.fspath(path))
        except ValueError:  # on this rank alone: an error would leave the others waiting
            log.warning("%s is not written: HOROVOD_TIMELINE=DYNAMIC must be set before init", path)
            return None
        stop: Callable[[], None] = self._horovod.stop_timeline
        return stop


class SoloWorld(World):
    """One process: every collective returns a copy of its argument."""

    engine, rank, size, local_rank, local_size = "solo", 0, 1, 0, 1

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def _run(self, kind: str, array: Array, *args: Any, **options: Any) -> Array:
        return np.array(array)


def load_engine(framework: Framework) -> ModuleType | None:
    """Return `horovod.<framework>`, or None for one process without Horovod; raises what `init` raises."""
    if _loaded and framework not in _loaded:
        (other,) = _loaded
        raise EngineConflictError(
            f"This process already runs Horovod for {other}. Received: a request for {framework}. One process uses one "
            f'engine. Call hvdtrain.init(framework="{framework}") before anything else does.'
        )
    if framework not in _loaded and os.environ.get("HVDTRAIN_SOLO") != "1":
        module = _import_horovod(framework)
        if module is not None:
            _loaded[framework] = module
    return _loaded.get(framework)


def _import_horovod(framework: Framework) -> ModuleType | None:
    """Import Horovod's module, or explain why several processes cannot run without it."""
    found, alone = launch_environment.detect(), launch_environment.is_alone()
    if importlib.util.find_spec("horovod") is None:
        if alone:
            return None
        raise HorovodMissingError(
            f"{found} started this process, but Horovod is not installed: every process would train alone. "
            f"Run `{installed.how_to_build()}` in this environment, or set HVDTRAIN_SOLO=1 to run one process on "
            "purpose."
        )
    problem = installed.mismatch(framework) or other_hosts.lacks() or None
    if problem is None:
        try:
            return importlib.import_module(f"horovod.{framework}")
        except (ImportError, OSError, RuntimeError) as error:
            problem = f"horovod.{framework} does not import: {error}"
    if alone:
        log.warning("%s Running as one process without Horovod; `hvdtrain build` fixes this.", problem)
        return None
    raise HorovodMismatchError(f"{problem} {found} started this process. Run `hvdtrain build` in this environment.")


def init_engine(
    framework: Framework, *args: Any, on_jax: bool | None = None, pick: Pick | None = None, **kwargs: Any
) -> ModuleType | None:
    """Load and initialise Horovod. `pick` takes a local rank's device; without it, the script does that."""
    if on_jax is None:  # find out before Horovod imports torch, which would look like the user's choice
        on_jax = launch_environment.runs_on_jax(None)
    module = load_engine(framework)
    if module is None:
        watchdog.alone()
        return None
    host: tuning.Host = frameworks.load(framework, "collectives")
    if pick and not on_jax and not launch_environment.is_alone() and (why := host.why_not(module)):
        raise HorovodMismatchError(f"rank {launch_environment.rank()}: {why}")
    if module.is_initialized():
        # Horovod's init may be called again, also by one rank alone. So no collective is allowed here.
        module.init(*args, **kwargs)
        devices.picked = pick(module.local_rank()) if pick else devices.picked
        return module
    found = launch_environment.detect()
    if launch_environment.lacks_pmix() and module.mpi_built():
        raise LaunchError(
            f"{found} started this process without PMIx, by which Open MPI's ranks find each other. Launch with "
            "`srun --mpi=pmix python script.py`, or set HVDTRAIN_SOLO=1 to run one process on purpose."
        )
    watchdog.begin()  # ranks wait for each other to start, too
    decided = tuning.prepare(framework, host, nccl=bool(module.nccl_built()), on_jax=on_jax)
    affinity = os.sched_getaffinity(0)
    module.init(*args, **kwargs)
    os.sched_setaffinity(0, affinity)  # MPI_Init may have narrowed it to one core
    given_comm = bool(args) or kwargs.get("comm") is not None
    if found and found.size and found.size != module.size() and not given_comm and not launch_environment.is_elastic():
        size = module.size()
        module.shutdown()
        raise LaunchError(
            f"{found} started this process, but Horovod sees {size} rank(s): each copy would train alone. Launch with "
            "`horovodrun -np N python script.py`, or set HVDTRAIN_SOLO=1 to run one process on purpose."
        )
    if module.rank() == 0:
        _warn_of_other_changes()
    watchdog.joined(module)
    _pause_before_forks()
    devices.picked = pick(module.local_rank()) if pick else devices.picked
    gpu = devices.from_driver if on_jax else host.gpu
    choice = gpu_path.own_choice(has_gpu=decided.nccl) if decided.chooses_gpu_path else None
    decided.device = devices.introduce(module, host.run, gpu=gpu, nccl=decided.nccl, choice=choice)
    ranks = [] if host.starts_with_threads() else devices.compare_once()
    if choice is not None:
        everyones = [each.choice for each in ranks]
        decided.gpu_path = gpu_path.take(gpu_path.agreed(everyones or [choice]), module)
    tuning.share_cores(decided, module, host)
    return module


@functools.cache  # registered once per process
def _pause_before_forks() -> None:
    """Pause before each fork, such as that of a DataLoader's workers, until other threads are idle.

    When Horovod's background thread releases a tensor, it holds a lock of the interpreter without the GIL. A child that
    is forked at that moment waits for the lock forever (CPython 3.11, in PyOS_AfterFork_Child). Directly after an
    allreduce, on busy cores, 10 of 4,004 forks hung; with half of this pause, 0 of 4,718.
    """
    os.register_at_fork(before=lambda: time.sleep(FORK_PAUSE_S))


@functools.cache  # once per process: an elastic job initializes in each round
def _warn_of_other_changes() -> None:
    if installed.has_other_changes():
        log.warning(
            "Another version of hvdtrain built the installed Horovod, with other changes to it than this one makes. "
            "Run `hvdtrain build` in this environment."
        )


def init(framework: str | None = None, *, seed: int | None = None) -> World:
    """Join the ranks that the launcher started and pick this rank's device; one process needs no launcher.

    Call it before you create the model, so that the model is on this rank's GPU. Later calls return the same World.

    Args:
        framework: "torch" or "keras" (or a Keras backend: "tensorflow", "jax"). By default whichever is already
            imported, Keras first; else KERAS_BACKEND; else the first that is installed.
        seed: default seed of the order of samples; must be equal on all ranks. No framework's random state changes.

    Raises:
        ValueError: unknown framework.
        HorovodMissingError: several processes were launched, but Horovod is not installed for this framework.
        HorovodMismatchError: likewise, but built for other framework versions.
        LaunchError: Horovod found another number of ranks than the launcher started, or ranks share a GPU.
        EngineConflictError: another framework's Horovod is already in use in this process.
    """
    global _world
    engine = launch_environment.engine_for(framework)
    if _world is None or (_world.engine not in ("solo", engine) and framework is not None):
        _world = make(engine, on_jax=launch_environment.runs_on_jax(framework))  # before Horovod imports torch
    if seed is not None:
        _world.seed = seed
    return _world


def init_if_missing(framework: str) -> World:
    """Return the World; call `init` where the script has not, and say so on rank 0: on GPUs that is too late."""
    is_late = _world is None
    world = init(framework)
    if is_late and world.size > 1 and world.is_root:
        log.log(
            logging.INFO if world.device == "cpu" else logging.WARNING,
            "The Trainer called hvdtrain.init(), because the script had not. Call hvdtrain.init() before you create "
            "the model, so that the model is on this rank's GPU.",
        )
    return world


def make(engine: Framework | None, *args: Any, on_jax: bool, **kwargs: Any) -> World:
    """Join the ranks and pick this rank's device; see `init_engine`."""
    if engine is None:
        watchdog.alone()
        return SoloWorld()
    host = frameworks.load("keras", "jax_device") if on_jax else frameworks.load(engine, "collectives")
    module = init_engine(engine, *args, on_jax=on_jax, pick=host.pick_device, **kwargs)
    return SoloWorld(host.pick_device(0)) if module is None else World(engine, module, devices.picked)


def current() -> World:
    """Return the World that `init` made."""
    if _world is None:
        raise NotInitializedError
    return _world


def data_set() -> Any:
    """Return Horovod's process set of the ranks that divide the data; None for all ranks, and before `init`."""
    return None if _world is None else _world.data_set


def refuse_grid(what: str, instead: str) -> None:
    """Raise HvdTrainError if a Grid divides the model, and `what` takes every rank's for a whole one."""
    if _world is not None and _world.grid is not None:
        raise HvdTrainError(
            f"{what} takes every rank's model for a whole one, and a Grid divides it. {instead}. Received: "
            f"{_world.grid}, on rank {_world.rank}"
        )


def use(world: World | None) -> None:
    """Make `world` the current World, None for no World: for tests, and for the next round of an elastic job."""
    global _world
    _world = world
