"""Record what torch does."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


class Trace:
    """Records operators, on the host and, if there is one, on the GPU, until `close` writes `path`."""

    def __init__(self, place: str) -> None:
        self.path = f"{place}.json"
        self._profile = torch.profiler.profile()
        self._profile.start()

    def step(self, number: int) -> AbstractContextManager[object]:
        """Mark a step in the trace."""
        return torch.profiler.record_function(f"step {number}")

    def close(self) -> None:
        """Write the trace as JSON, which chrome://tracing and Perfetto show."""
        self._profile.stop()
        self._profile.export_chrome_trace(self.path)


def trace(place: str) -> Trace:
    """Begin to record, for a file at `place`."""
    return Trace(place)
