"""The GPU's clock: marks in its stream, read when it has passed them, so that no step waits for it."""

from __future__ import annotations

import time

import torch

from hvdtrain.distributed import gpu_path
from hvdtrain.distributed.recorder import Clock

Mark = torch.cuda.Event | float


class GpuClock(Clock):
    """Time as the GPU spends it; the host's until the GPU is used, and where it never is."""

    runs_behind = True

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(self._mark)
        self._device = device

    def _mark(self) -> Mark:
        """Mark the place up to which the current stream was given work."""
        if not torch.cuda.is_initialized():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, began: Mark, ended: Mark) -> float:
        """Return the time that the GPU took from one mark to a later one; 0 where the first use of it lies between."""
        if isinstance(began, float) or isinstance(ended, float):
            return ended - began if isinstance(began, float) and isinstance(ended, float) else 0.0
        return float(began.elapsed_time(ended)) / 1000.0

    def reach(self, mark: Mark) -> None:
        """Wait until the GPU has passed a mark."""
        if not isinstance(mark, float):
            mark.synchronize()


def of_bench() -> Clock:
    """Return the clock for `hvdtrain bench`: the GPU's if the host runs ahead of it, else the host's behind it."""
    return GpuClock() if gpu_path.is_async() and torch.cuda.is_available() else Clock(_finished)


def _finished() -> float:
    """Return the time when the current stream is done; a call that returns early has not taken that little time."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()  # reductions run on others
    return time.perf_counter()
