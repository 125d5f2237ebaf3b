"""Find what this process waits for, from its threads' Python stacks, so that no step pays for it; count its steps.

A thread that waits for other ranks is in one of a few functions of Horovod, each of which makes one native call.
TensorFlow's graphs hide this: there two counters show it, one before a step's reductions and one after. If
the host runs ahead of its GPU (`gpu_path`), no thread waits for a step's reductions: an event behind them shows whether
the GPU has finished.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

from hvdtrain.distributed.watchdog import tracebacks

# The end of a file's name and a function: what is waited for there.
_PLACES = {
    ("horovod/torch/mpi_ops.py", "synchronize"): "collective",
    ("horovod/common/basics.py", "_add_process_set_impl"): "collective",
    ("horovod/common/basics.py", "_remove_process_set_impl"): "collective",
    ("horovod/common/basics.py", "init"): "start",
    ("horovod/common/basics.py", "shutdown"): "end",
    ("tensorflow/python/eager/execute.py", "quick_execute"): "graph",
}
_COLLECTIVES = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "join", "barrier")
_SHOWN_NAMES = 3

_steps = 0
_given = False  # the number of the step, by a caller that knows it
_report: Callable[[int], None] | None = None  # called with the number of each step
# Name of the first gradient -> (all names, what returns how many reductions have begun and how many have ended).
_graphs: dict[str, tuple[Sequence[str], Callable[[], tuple[int, int]]]] = {}
# A thread that always waits for other ranks, and what returns the number of the step for which the process waits.
_step: tuple[int, Callable[[], int | None]] | None = None
# The oldest step that a GPU had not finished when the next one was noted: its number, what returns whether it has.
_device: tuple[int, Callable[[], bool]] = (0, lambda: True)


class Wait(NamedTuple):
    """One thread that waits for other ranks."""

    key: Hashable  # equal for as long as it is the same wait
    # "collective", "graph" (a collective in a graph), "device" (a GPU's), "step" (that other ranks have not closed),
    # "start" or "end" (of Horovod)
    kind: str
    thread: int  # its identity
    names: Sequence[str] = ()

    @property
    def what(self) -> str:
        """The operation that the thread waits for, in words: "allreduce of 'layer3.weight'"."""
        if self.kind in ("start", "end"):
            return f"hvd.{'init' if self.kind == 'start' else 'shutdown'}, for the other ranks"
        if self.kind == "graph":
            return f"the reduction of {_listed(self.names)}"
        if self.kind == "step":
            return "a step that has not enough batches of other ranks"
        if self.kind == "device":
            return "a step's reductions on the GPU"
        return describe(frames().get(self.thread))


def note_graph(names: Sequence[str], counts: Callable[[], tuple[int, int]]) -> None:
    """Note a function that returns how often the reduction of `names` in a graph has begun and ended."""
    _graphs[names[0]] = (names, counts)


def note_device(done: Callable[[], bool]) -> None:
    """Note a function that returns whether a GPU has finished a step's reductions, which no thread waits for."""
    global _device
    if _device_is_done():
        _device = (_device[0] + 1, done)


def note_step(thread: int, waited_for: Callable[[], int | None]) -> None:
    """Note a thread that always waits for other ranks, and what returns the step for which this rank waits."""
    global _step
    _step = (thread, waited_for)


def forget_step(thread: int) -> None:
    """Forget what `note_step` noted, because the thread has ended."""
    global _step
    if _step is not None and _step[0] == thread:
        _step = None


def _device_is_done() -> bool:
    with contextlib.suppress(Exception):  # the device's own error, which the main thread will get
        return _device[1]()
    return True


def step_done(step: int | None = None) -> None:
    """Note that a step is done, `step` of them where the caller knows; from then on calls without it do not count."""
    global _steps, _given
    if step is not None:
        _steps, _given = step, True
    elif not _given:
        _steps += 1
    if _report is not None:
        _report(_steps)


def report_steps(report: Callable[[int], None]) -> None:
    """Call `report` with the number of each step that is done from now on."""
    global _report
    _report = report


def report_counted() -> None:
    """Report the steps that only a graph has counted."""
    if _report is not None and not _given and (done := steps_done()) > _steps:
        _report(done)


def steps_done() -> int:
    """Return how many steps this rank has done, as far as it is known: reported, counted, or counted by a graph."""
    return _steps if _given else max(_steps, *(ended for *_, ended in _counted()), 0)


def frames() -> dict[int, FrameType]:
    """Return each thread's current frame.

    Python 3.11 makes these objects under a lock, and may collect garbage meanwhile. If that frees a tensor, torch lets
    other threads run. A thread that ends then waits for that lock while it holds the GIL, and the process hangs
    (CPython's issue 106883). So garbage collection is off here.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def find(*, besides: int | None = None) -> list[Wait]:
    """Return the waits of this process's threads, except for the thread `besides`."""
    waits = []
    for thread, frame in frames().items():
        if thread == besides or (_step is not None and thread == _step[0]):
            continue
        code = frame.f_code
        kind = _kind(code)
        if kind == "graph":
            waits += [
                Wait((name, began), kind, thread, names) for name, names, began, ended in _counted() if began != ended
            ]
        elif kind is not None:
            # Horovod never gives a handle's number twice. A frame is held until the next check, so that no
            # other can take its address and be mistaken for it.
            handle = frame.f_locals.get("handle") if code.co_name == "synchronize" else None
            waits.append(Wait((thread, handle if isinstance(handle, int) else frame), kind, thread))
    if _step is not None and (number := _step[1]()) is not None:
        waits.append(Wait(("step", number), "step", threading.main_thread().ident or 0))
    if not _device_is_done():
        waits.append(Wait(("device", _device[0]), "device", threading.main_thread().ident or 0))
    return waits


@functools.cache
def _kind(code: CodeType) -> str | None:
    if code.co_filename == "<string>" and code.co_name.startswith("horovod_"):
        return "collective"  # TensorFlow generates these functions
    name = code.co_filename.replace(os.sep, "/")
    return next((kind for (file, function), kind in _PLACES.items()
                 if code.co_name == function and name.endswith(file)), None)  # fmt: skip


def _counted() -> list[tuple[str, Sequence[str], int, int]]:
    found = []
    for name, (names, counts) in list(_graphs.items()):
        with contextlib.suppress(Exception):  # the variables of a session that was cleared
            found.append((name, names, *counts()))
    return found


def describe(frame: FrameType | None) -> str:
    """Return what a thread waits for, from the functions on its stack and the names they were called with."""
    kind = ""
    names: list[str] = []
    while frame is not None and not tracebacks.is_users(frame.f_code.co_filename):
        function = frame.f_code.co_name.removeprefix("horovod_").strip("_")
        function = function.removesuffix("_async").removeprefix("grouped_")
        kind = kind or (function if function in _COLLECTIVES else "")
        names = names or _names(frame.f_locals)
        frame = frame.f_back
    if not kind and names:  # hvdtrain/torch/grid/groups.py names what torch.distributed starts
        by_torch = names[0].startswith("torch.distributed.")
        kind = names[0].split(".")[2] if by_torch else "allreduce"
    kind = kind or "a collective"
    return f"{kind} of {_listed(names)}" if names else kind


def _names(local: dict[str, Any]) -> list[str]:
    this = local.get("self")
    for names in (getattr(this, "names", None), getattr(this, "name", None), local.get("name")):
        if isinstance(names, str) and names:
            return [names]
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            return names
    return []


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN_NAMES])
    more = len(names) - _SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def place(frame: FrameType | None) -> str:
    """Return where a stack is in the user's own code, "train.py:38 in main"; "" if it is in none."""
    while frame is not None and not tracebacks.is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    name = frame.f_code.co_name
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" + f" in {name}" * (name[0] != "<")


def stacks(first: int | None = None, *, besides: int | None = None) -> str:
    """Return the Python stacks of the main thread, of the thread `first`, and of those that run the user's own code."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    there = frames()
    for thread in sorted(there, key=lambda t: (t != main, t != first)):
        if thread != besides and (thread in (main, first) or place(there[thread])):
            label = "main thread" if thread == main else f"thread {names.get(thread, thread)}"
            parts.append(f"Stack of the {label}:\n" + tracebacks.format_stack(there[thread]))
    return "".join(parts)
