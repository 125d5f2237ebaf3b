"""How long this rank has waited for others: for reduced gradients, and in its World's collectives.

Whoever reduces gradients adds to it: PyTorch and Keras's torch and JAX backends as they wait, TensorFlow's graphs
through a variable of theirs, which is read only when somebody asks. A GPU's waits within steps are its clock's alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

_seconds = 0.0
_graphs: list[Callable[[], float]] = []


class Device(Protocol):
    """A device that computes behind the host, and by whose clock steps are timed; `hvdtrain.torch.gpu_clock`."""

    def training(self) -> AbstractContextManager[None]:
        """Count what is sent to the device within as a step's training."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """Count as waited what the device stands still within."""
        ...

    @property
    def takes_waits(self) -> bool:
        """True where a wait is part of a step."""
        ...

    def read(self) -> tuple[float, float]:
        """Return the seconds trained so far, and those of them that were waited."""
        ...


device: Device | None = None


@contextmanager
def counted() -> Iterator[None]:
    """Count the time within as waited."""
    global _seconds
    if device is not None and device.takes_waits:
        with device.waiting():
            yield
        return
    began = time.perf_counter()
    try:
        yield
    finally:
        _seconds += time.perf_counter() - began


def note_graph(seconds: Callable[[], float]) -> None:
    """Let `seconds` tell how long a graph has waited so far."""
    _graphs.append(seconds)


def outside_graphs() -> float:
    """Return the seconds since this process began that no graph has waited; costs nothing to ask."""
    return _seconds


def in_graphs() -> float:
    """Return the seconds since this process began that graphs have waited."""
    found = 0.0
    for seconds in _graphs:
        try:
            found += seconds()
        except Exception:  # noqa: BLE001 - the variable of a session that was cleared
            continue
    return found
