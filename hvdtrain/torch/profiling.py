"""Record what torch does."""

from __future__ import annotations

import torch


def start() -> torch.profiler.profile:
    """Begin to record operators, on the host and, if there is one, on the GPU."""
    profile = torch.profiler.profile()
    profile.start()
    return profile


def stop(profile: torch.profiler.profile, path: str) -> None:
    """End it, and write a trace that chrome://tracing and Perfetto show."""
    profile.stop()
    profile.export_chrome_trace(path)
