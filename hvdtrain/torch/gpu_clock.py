"""Time as the GPU spends it: marks in its current stream, read when it has passed them, so that no step waits for it.

The host sends work to a GPU and goes on; what it measures by its own clock is how long that takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

Mark = torch.cuda.Event


def mark() -> Mark:
    """Mark the place that the current stream has been given work up to."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(began: Mark, ended: Mark) -> float:
    """Return the time that the GPU took from one mark to a later one; it must have passed both."""
    return float(began.elapsed_time(ended)) / 1000.0


class GpuClock:
    """How long the GPU has trained, and how much of that it stood still for other ranks; see `wait_time`."""

    def __init__(self) -> None:
        self._spans: deque[tuple[str, Mark, Mark]] = deque()
        self._seconds = {"training": 0.0, "waiting": 0.0}
        self._open: set[str] = set()  # spans that have begun

    def training(self) -> AbstractContextManager[None]:
        """Count what is sent to the GPU within as a step's training."""
        return self._span("training")

    def waiting(self) -> AbstractContextManager[None]:
        """Count as waited what the GPU stands still within."""
        return self._span("waiting")

    @contextmanager
    def _span(self, kind: str) -> Iterator[None]:
        began = mark()
        self._open.add(kind)
        try:
            yield
        finally:
            self._open.discard(kind)  # a wait of another thread may have ended within this one
            self._spans.append((kind, began, mark()))

    @property
    def takes_waits(self) -> bool:
        """True within a step's training, but for a wait within another one."""
        return self._open == {"training"}

    def read(self) -> tuple[float, float]:
        """Return the seconds trained so far, and those of them that were waited; waits for the GPU to come this far."""
        if self._spans:
            self._spans[-1][2].synchronize()
        while self._spans:
            kind, began, ended = self._spans.popleft()
            self._seconds[kind] += seconds(began, ended)
        return self._seconds["training"], self._seconds["waiting"]
