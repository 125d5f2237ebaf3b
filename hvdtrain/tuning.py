"""What `init` decides so that nobody has to tune: how ranks talk and wait, their threads, the memory they keep.

Horovod and Open MPI read their settings from the environment when they start. Whatever the user has set there stays;
the rest is set here. What each choice is worth was measured: benchmarks/README.md has the record.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from hvdtrain import launcher

log = logging.getLogger("hvdtrain")

PIECES = "HVDTRAIN_MPI_PIECE_BYTES"
FUSION = "HOROVOD_FUSION_THRESHOLD"
CYCLE = "HOROVOD_CYCLE_TIME"
KEEP_MEMORY = "HVDTRAIN_KEEP_MEMORY"

# mallopt's parameters, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 2**30  # a larger block is given back when it is freed: it is data, not a step's working memory

# Set here, not by the user: a second init in one process must not take them for the user's.
_ours: dict[str, str] = {}
_said = False


@dataclass
class Tuning:
    """What was decided before Horovod started."""

    one_host: bool
    gpu: bool
    keeps_memory: bool = False
    yours: list[str] = field(default_factory=list)


def prepare(engine: str, *, gpu: bool) -> Tuning:
    """Decide what must be decided before Horovod starts.

    Args:
        engine: "torch" or "tensorflow".
        gpu: whether ranks compute on GPUs, for which Horovod's own defaults are right.

    Raises:
        ValueError: HVDTRAIN_MPI_PIECE_BYTES is not a number of bytes.
    """
    tuning = Tuning(one_host=launcher.on_one_host(), gpu=gpu)
    _check_bytes(PIECES)
    # Ranks that spin while they wait starve the ones that compute: 2 to 13 times slower on full cores.
    wanted = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    if tuning.one_host:
        # In pieces that fit the cache, copying through shared memory beats reading the other process's memory, which
        # costs a system call and page-table walk a piece.
        wanted |= {PIECES: str(512 * 2**10), "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
    if not gpu:
        # Only small tensors gain by being copied into one buffer; 64 MB would be copied in and out for nothing.
        wanted[FUSION] = str(2**20)
    for variable, value in wanted.items():
        if os.environ.get(variable, value) == _ours.get(variable, value):
            os.environ[variable] = _ours[variable] = value
        else:
            tuning.yours.append(f"{variable}={os.environ[variable]}")
    if not gpu:
        # TensorFlow allocates on threads of its own, whose arenas give everything back.
        tuning.keeps_memory = keep_freed_memory(one_arena=engine == "tensorflow")
    return tuning


def settle(tuning: Tuning, module: ModuleType, set_threads: Callable[[int], int | None]) -> None:
    """Share out the cores, now that ranks know each other, and say once, on rank 0, what was decided.

    Args:
        tuning: what `prepare` returned.
        module: Horovod's, initialised.
        set_threads: takes a number of threads and returns the one in force, None where that cannot be told.
    """
    global _said
    threads = None
    if module.local_size() > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = set_threads(max(1, usable_cores() // module.local_size()))
    elif os.environ.get("OMP_NUM_THREADS", "").isdigit():
        threads = int(os.environ["OMP_NUM_THREADS"])
    if module.size() > 1 and module.rank() == 0 and not _said:
        _said = True
        log.info("%s", describe(tuning, module, threads))


def describe(tuning: Tuning, module: ModuleType, threads: int | None) -> str:
    """Return one line: what was decided, and what the user had decided."""
    size, hosts = module.size(), "1 host" if tuning.one_host else "several hosts"
    words = [f"{size} ranks on {hosts}"]
    if tuning.gpu and module.nccl_built():
        words.append("NCCL")
    elif module.mpi_enabled():
        words.append("Open MPI")
        if tuning.one_host and PIECES in os.environ:
            words.append(f"shared memory in pieces of {_kib(PIECES)}")
    else:
        hint = "; Open MPI's shared memory is several times faster: install it, then `hvdtrain build`"
        words.append("Gloo over TCP" + hint * tuning.one_host)
    if threads:
        words.append(f"{threads} thread{'s' * (threads > 1)} a rank")
    words.append(f"cycle {os.environ.get(CYCLE, '1')} ms")
    if FUSION in os.environ:
        words.append(f"tensors up to {_kib(FUSION)} fused")
    if tuning.keeps_memory:
        words.append("freed memory kept")
    if tuning.yours:
        words.append("yours: " + ", ".join(tuning.yours))
    return ", ".join(words)


def keep_freed_memory(*, one_arena: bool) -> bool:
    """Let glibc keep what is freed, for the next step to use; return whether it does.

    A step frees its gradients and the next one allocates them anew. By default each large one is a mapping of its own,
    given back and faulted in again page by page: 20 of an MLP's 110 ms. A step needs no more memory than before, but
    what was once used is not given back before the end. HVDTRAIN_KEEP_MEMORY=0 leaves malloc alone, and so do settings
    of the user's own (MALLOC_*, GLIBC_TUNABLES).

    Args:
        one_arena: threads share one heap, for frameworks whose large blocks are allocated on several.
    """
    own = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if own or os.environ.get(KEEP_MEMORY) == "0" or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
        os.confstr("CS_GNU_LIBC_VERSION")  # musl has a mallopt of no effect
    except (AttributeError, OSError, ValueError):
        return False
    done = mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) == 1 and mallopt(_M_TRIM_THRESHOLD, -1) == 1
    if done and one_arena:
        mallopt(_M_ARENA_MAX, 1)
    return bool(done)


def usable_cores() -> int:
    """Return the number of cores that this process may use: its affinity, or its container's share if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit
        pass
    return cores


def _kib(variable: str) -> str:
    value = os.environ[variable]
    return f"{int(value) // 1024} KiB" if value.isdigit() else value


def _check_bytes(variable: str) -> None:
    value = os.environ.get(variable, "0")
    if not value.isdigit():
        raise ValueError(f"{variable} must be a number of bytes, 0 for whole tensors. Received: {variable}={value!r}")
