"""The memory of this process on its host, its limit, and what the kernel's OOM killer has ended."""

from __future__ import annotations

import contextlib
import mmap
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# In the folder of a cgroup, of version 2 and of version 1.
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_EVENTS = ("memory.events", "memory.oom_control")


def resident() -> int:
    """Return the bytes that this process has in memory now; 0 if that is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((PROC / "self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
    return 0


def peak() -> int:
    """Return the most bytes that this process has had in memory. It takes about a microsecond."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def limit() -> int | None:
    """Return the bytes that the processes of this cgroup may have in memory, at most those of the host."""
    found = [_number(folder / name) for folder in _cgroups() for name in _LIMITS]
    with contextlib.suppress(OSError):
        found.append(1024 * _numbers(PROC / "meminfo").get("MemTotal:", 0))
    return min((each for each in found if each), default=None)


def oom_kills() -> int:
    """Return how many processes of this cgroup the OOM killer has ended; of the host, if no cgroup says it."""
    for path in (folder / name for folder in _cgroups() for name in _EVENTS):
        with contextlib.suppress(OSError):
            if "oom_kill" in (found := _numbers(path)):
                return found["oom_kill"]
    return host_oom_kills()


def host_oom_kills() -> int:
    """Return how many processes of this host the OOM killer has ended, in all cgroups."""
    with contextlib.suppress(OSError):
        return _numbers(PROC / "vmstat").get("oom_kill", 0)
    return 0


def _cgroups() -> Iterator[Path]:
    """Yield the folders of this process's cgroup, and of those above it, the innermost first."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (PROC / "self/cgroup").read_text(encoding="utf-8").splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = CGROUPS / controllers
        folder = root / path.lstrip("/")
        while not folder.is_dir() and folder != root:  # a container sees its own part only
            folder = folder.parent
        while folder.is_dir():
            yield folder
            if folder == root:
                break
            folder = folder.parent


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # "max"
        return int(path.read_text(encoding="ascii"))
    return None


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    pairs = (line.split()[:2] for line in path.read_text(encoding="ascii").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
