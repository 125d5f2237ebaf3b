"""The facts beside every figure: the machine, the versions, the commit and the time."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

_PACKAGES = (
    "hvdtrain", "horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "jax", "accelerate", "lightning-fabric",
    "numpy",
)  # fmt: skip


def collect() -> dict[str, Any]:
    """Return facts of this machine and environment."""
    return {
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=10"),
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": platform.platform(),
            "python": platform.python_version(),
            "mpi": _output("mpirun", "--version").partition("\n")[0],
            "load": os.getloadavg()[0],
        },
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except OSError:
        return ""
