"""The most memory that a process has within a block, for tests of what is held meanwhile."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

ROOM = 6_000_000  # bytes, for what is no array


class Measured:
    """The most memory that this process has had within the block beyond what it had before, in bytes."""

    def __enter__(self):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # hvdtrain lets malloc keep what is freed
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is there
        self._before = self._status("VmRSS")
        return self

    def __exit__(self, *_):
        self.peak = self._status("VmHWM") - self._before

    def _status(self, key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def arrays_of(world, peak, array_bytes):
    """Return how many arrays of this size each rank held at once, from its peak."""
    return [round(each / array_bytes, 2) for each in world.allgather_object(max(0, peak - ROOM), name="peaks")]
