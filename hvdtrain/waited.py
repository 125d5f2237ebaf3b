"""How long this rank has waited for others: for reduced gradients, and in its World's collectives.

Whoever reduces gradients adds to it: PyTorch and Keras's torch and JAX backends as they wait, TensorFlow's graphs
through a variable of theirs, which is read only when somebody asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_seconds = 0.0
_graphs: list[Callable[[], float]] = []


@contextmanager
def counted() -> Iterator[None]:
    """Count the time within as waited."""
    global _seconds
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
