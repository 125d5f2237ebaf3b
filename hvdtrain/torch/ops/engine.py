"""The library that moves tensors, horovod.torch or its stand-in for one process, and handles on its operations."""

from __future__ import annotations

import functools
import importlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from types import ModuleType
from typing import Any

from hvdtrain.distributed import world
from hvdtrain.errors import NotInitializedError

OPS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
Average, Sum, Adasum, Min, Max, Product = range(len(OPS))  # Horovod's own numbers for them

generation = 0  # changes with every init and shutdown: older handles are invalid

_module: ModuleType | None = None
_counters: defaultdict[Any, itertools.count[int]] = defaultdict(itertools.count)


def module() -> Any:
    """Return horovod.torch, or `hvdtrain.torch.ops.solo` in one process without Horovod; raises what `init` does."""
    global _module
    _module = _module or world.load_engine("torch") or importlib.import_module("hvdtrain.torch.ops.solo")
    return _module


def native() -> Any:
    """Return `module()` for what needs `init`: before it, NotInitializedError says what to do."""
    found = module()
    if not found.is_initialized():
        raise NotInitializedError
    return found


def after_init(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of Horovod's, such as `rank`, that asks for `init`."""

    @functools.wraps(function)
    def ask(*args: Any, **kwargs: Any) -> Any:
        native()
        return function(*args, **kwargs)

    return ask


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
    fresh = not module().is_initialized()
    # world.init calls init() without arguments: pass on only what was given, so that both forms agree.
    given = {k: v for k, v in (("comm", comm), ("process_sets", process_sets)) if v is not None}
    if world.init_engine("torch", **given) is None:
        module().init(**given)
    if fresh:
        start_over()


def shutdown() -> None:
    """Leave the run; collectives raise until the next `init`."""
    module().shutdown()
    start_over()


def start_over() -> None:
    """Count unnamed operations from zero and forget handles of before; called where all ranks start together."""
    global generation
    generation += 1
    count_from_zero()


def auto_name(kind: str, process_set: Any) -> str:
    """Return the next name for an unnamed operation, from a counter of the process set that `join` starts over."""
    # By Horovod's one counter a rank that joined early, or is outside a set, counts fewer: the next operation hangs.
    key = process_set.process_set_id
    return f"hvdtrain.{kind}.{key}.{next(_counters[key])}"


def count_from_zero() -> None:
    """Count unnamed operations from zero again; called where all ranks are at one place."""
    _counters.clear()


def global_set(process_set: Any = None) -> Any:
    """Return `process_set`, or the set of all ranks for None."""
    if process_set is None:
        return native().global_process_set
    if process_set.process_set_id is None:
        raise ValueError(
            f"The process set is not registered: call hvd.add_process_set on all ranks first. Received: {process_set}"
        )
    return process_set


def is_global(process_set: Any) -> bool:
    """True for the set of all ranks, the only one on which ranks can join."""
    return bool(process_set.process_set_id == 0)


OF_TORCH = "torch.distributed."  # in the names of what torch calls itself, such as fully_shard's operations


class _Count(threading.local):
    operations = 0


started = _Count()  # operations that this thread has started, without those of torch.distributed


class Handle:
    """One operation in flight; calling it waits too.

    `parts` are native handles, or other handles, that must be done first; `finish`, given their outputs, returns the
    result. The watchdog reads `name` from the stack, to say which operation a rank waits for.
    """

    def __init__(self, parts: Sequence[Any], finish: Callable[..., Any], name: str = "") -> None:
        self.name = name
        self._parts, self._finish = list(parts), finish
        self._generation = generation
        self._done = False
        self._result: Any = None
        started.operations += OF_TORCH not in name

    def poll(self) -> bool:
        """True when `wait` will not block."""
        return self._done or all(poll(part) for part in self._parts)

    def wait(self) -> Any:
        """Block until the operation is done and return its result; later calls return the same."""
        if not self._done:
            if self.is_stale:
                self._done = True
                raise module().HorovodInternalError("This operation was submitted before hvd.shutdown().")
            outputs, errors = [], []
            for part in self._parts:
                try:
                    outputs.append(synchronize(part))
                except Exception as error:  # noqa: BLE001 - wait for the others first, they write into our buffers
                    errors.append(error)
            # Only now: after an interruption, by a signal handler for example, `wait` may be called again.
            self._done = True
            if errors:
                raise errors[0]
            self._result = self._finish(*outputs)
            self._parts = []
        return self._result

    __call__ = wait

    def first(self) -> Handle:
        """Return a handle on the first of this one's results."""
        return Handle([self], lambda results: results[0], self.name)

    @property
    def is_stale(self) -> bool:
        """True if Horovod was shut down since: native handles are numbers that may mean something else by now."""
        return self._generation != generation


class Staged(Handle):
    """Collectives of which each needs the result of the one before, as one operation in flight.

    `stages` is a generator: it starts a collective, yields its handle, gets what came of it, and returns the result.
    """

    def __init__(self, stages: Generator[Any, Any, Any], name: str) -> None:
        super().__init__([next(stages)], lambda: None, name)
        self._stages = stages

    def advance(self) -> bool:
        """Wait for the collective in flight and start the next one; False if it was the last."""
        if self._done or self.is_stale:
            return False
        try:
            # An interruption, by a signal handler for example, leaves the stages where they are.
            self._parts = [self._stages.send(synchronize(self._parts[0]))]
        except StopIteration as end:
            self._result, self._done, self._parts = end.value, True, []
        except Exception:
            self._done = True
            raise
        return not self._done

    def wait(self) -> Any:
        """Go through all collectives and return the result; later calls return the same."""
        while self.advance():
            pass
        return super().wait()

    __call__ = wait


def poll(handle: Any) -> bool:
    """Return whether the operation is done, so that `synchronize` will not block."""
    return handle.poll() if isinstance(handle, Handle) else bool(native().poll(handle))


def synchronize(handle: Any) -> Any:
    """Wait for an asynchronous operation and return its result; HorovodInternalError if it failed on any rank."""
    return handle() if callable(handle) else native().synchronize(handle)
