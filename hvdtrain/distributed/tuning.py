"""Tune for users, in `init`: how ranks communicate and wait, their threads, freed memory.

Horovod and Open MPI read their settings from the environment when they start. The user's settings stay; the others are
set here. benchmarks/RESULTS.md has measurements of each choice.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.distributed import devices, gpu_path, launch_environment, watchdog
from hvdtrain.system import network, open_mpi
from hvdtrain.system.process_tree import RUN_DIR

log = logging.getLogger("hvdtrain")
Array = NDArray[Any]

PIECES = "HVDTRAIN_MPI_PIECE_BYTES"
FUSION = "HOROVOD_FUSION_THRESHOLD"
CYCLE = "HOROVOD_CYCLE_TIME"
KEEP_MEMORY = "HVDTRAIN_KEEP_MEMORY"

# mallopt's parameters, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# Blocks below are taken from the heap, which holds on to them; larger ones are mapped and returned.
_SMALL_BLOCKS, _NEARLY_ALL_BLOCKS = 2**25, 2**30
# Mapped and returned in a training that frees its gradients within a step. From 1 MiB on, a step of GPT with 100M
# parameters took twice as long; from 8 MiB on, no longer than without.
_LARGE_BLOCKS = 2**23
_QUOTA_AND_PERIOD = (
    ["/sys/fs/cgroup/cpu.max"],
    [f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us" for name in ("quota", "period")],
)
_MOST_CORES = 4096
_ROUNDING = 1e-9  # three times a third of a core is one

# Ranks of one host without GPUs do not need transports to other hosts, which listen on every interface, nor hwloc's
# plugins that search for GPUs with X and OpenCL, or parse XML with a library, at 5 MiB a rank.
_NO_NETWORKS = {
    "OMPI_MCA_btl": "^openib,ofi,tcp,uct,usnic",
    "HWLOC_PLUGINS_BLACKLIST": "hwloc_gl.so,hwloc_opencl.so,hwloc_xml_libxml.so",
}

# By default Open MPI writes half a tensor to a TCP connection at once ("put"). What a rank has to answer waits behind
# that, and meanwhile the other rank does not send: over 100 Mb/s and 1 Gb/s an allreduce took up to twice as long as
# the link needs. "send" cuts messages into fragments.
_BETWEEN_HOSTS = {"OMPI_MCA_btl_tcp_flags": "send"}

# horovodrun's own setting, with which it starts mpirun: not the user's.
_HOROVODRUNS = {"OMPI_MCA_btl": "^openib"}
# What Open MPI 4 maps by default. 5 maps 16 MiB per rank; if /dev/shm is too small for that, ranks abort.
_SEGMENT_IN_5 = {"OMPI_MCA_btl_sm_segment_size": str(2**22)}
_SHARED_BYTES_A_RANK = 2**23  # twice what Open MPI maps

# Set here, not by the user: a second init in one process must not take them for the user's.
_ours: dict[str, str] = {}
_said = False


@dataclass
class Tuning:
    """The decisions made before Horovod starts."""

    one_host: bool
    nccl: bool = False
    device: str = ""  # what rank 0 computes on, "" if unknown
    chooses_gpu_path: bool = False  # of all ranks, also of one without a GPU: by the build
    gpu_path: str = ""  # the choice in words
    keeps_memory: bool = False
    put_off: str = ""
    yours: list[str] = field(default_factory=list)


class Host(Protocol):
    """A framework's work with host arrays and with its share of the host: `collectives` of each framework."""

    def run(self, horovod: ModuleType, kind: str, array: Array, *args: Any, **options: Any) -> Array:
        """Return what Horovod's collective `kind`, such as "allreduce", makes of a host array."""

    def pick_device(self, local_rank: int) -> str:
        """Make this rank's GPU the current one and return its name, or "cpu"."""

    def has_gpu(self) -> bool:
        """Return whether the framework sees a GPU."""

    def why_not(self, horovod: ModuleType) -> str:
        """Return why `horovod` cannot serve the GPU that this process would compute on, "" if it can."""

    def gpu(self, index: int) -> tuple[str, str]:
        """Return UUID and name of a GPU that this process sees."""

    def put_off_loading(self) -> str:
        """Put off loading the parts of the framework that most trainings never use; return their names."""

    def starts_with_threads(self) -> bool:
        """Return whether the number of threads must be known before anything is computed, a collective included."""

    def set_threads(self, threads: int) -> int | None:
        """Compute with at most so many threads; return the number in force, None where that is unknown."""


def prepare(engine: str, host: Host, *, nccl: bool, on_jax: bool = False) -> Tuning:
    """Decide what must be decided before Horovod starts; `nccl` says whether it was built with NCCL."""
    nccl = nccl and not on_jax  # JAX's gradients travel from host memory
    tuning = Tuning(one_host=launch_environment.on_one_host(), nccl=nccl and host.has_gpu())
    pieces = os.environ.get(PIECES, "0")
    if not pieces.isdecimal():
        raise ValueError(f"{PIECES} must be a number of bytes, 0 for whole tensors. Received: {PIECES}={pieces!r}")
    launch = launch_environment.detect()
    # Ranks that spin while they wait starve the ones that compute: 2 to 13 times slower on full cores.
    wanted = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    if tuning.one_host:
        # In pieces that fit the cache, copying through shared memory beats reading the other process's memory, which
        # costs a system call and page-table walk a piece.
        wanted |= {PIECES: str(512 * 2**10), "OMPI_MCA_btl_vader_single_copy_mechanism": "none", **_SEGMENT_IN_5}
        if launch and not host.has_gpu() and _has_room_for(launch.size or _MOST_CORES):
            wanted |= _NO_NETWORKS
    elif launch is not None:
        wanted |= _BETWEEN_HOSTS | network.without_bridges(os.environ)
    if (not nccl or engine == "torch") and os.environ.get("HOROVOD_AUTOTUNE", "0") == "0":
        # By the build, not by this rank's GPU: ranks that fuse differently would wait for each other for ever.
        # Small gradients are sent in hvdtrain's buckets, and large ones gain nothing from a copy. Which tensors Horovod
        # fuses depends on timing. On three ranks or more, so does the order in which they are added up, and the last
        # bit of the weights. Without fusion a tensor also starts a cycle at once. Autotuning cannot change what is set.
        wanted[FUSION] = "0"
    given = {variable: os.environ[variable] for variable in wanted if variable in os.environ}
    wanted = {**open_mpi.for_both({**wanted, **given}), **wanted}
    tuning.chooses_gpu_path = engine == "torch" and nccl
    if tuning.chooses_gpu_path:
        gpu_path.check()
    tuning.yours = [f"{variable}={os.environ[variable]}" for variable in _set(wanted)]
    _set(watchdog.horovods_limits())
    if not tuning.nccl:
        tuning.keeps_memory = keep_freed_memory(torch=engine == "torch" and not on_jax)
    tuning.put_off = host.put_off_loading()
    return tuning


def _set(wanted: dict[str, str]) -> list[str]:
    """Set environment variables, except those that the user has set; return the names of the latter."""
    yours = []
    for variable, value in wanted.items():
        if os.environ.get(variable, value) in (_ours.get(variable, value), _HOROVODRUNS.get(variable)):
            os.environ[variable] = _ours[variable] = value
        else:
            yours.append(variable)
    return yours


def without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without what was decided for this process alone."""
    return {name: value for name, value in environment.items() if _ours.get(name) != value}


def share_cores(tuning: Tuning, module: ModuleType, host: Host) -> None:
    """Divide the host's cores among its ranks, once Horovod has started, and log all decisions once, on rank 0."""
    global _said
    if module.size() == 1:
        return
    local_size = module.local_size()
    if host.starts_with_threads():
        share = usable_cores() / local_size
        is_exact = len(os.sched_getaffinity(0)) == os.cpu_count()  # else each rank may have cores of its own
    else:  # a collective: whatever this rank's settings are
        share, is_exact = share_of_cores(module, host), True
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(chosen) if chosen.isdecimal() else host.set_threads(max(1, int(share + _ROUNDING)))
    if module.rank() == 0 and not _said:
        _said = True
        log.info("%s", describe(tuning, module, threads))
        if share < 1 - _ROUNDING and is_exact and RUN_DIR not in os.environ:  # `hvdtrain run` has said it
            cores = f"{share * local_size:.3g} core{'s' * (share * local_size > 1 + _ROUNDING)}"
            log.warning("%d ranks share %s of this host: more ranks than cores train no faster", local_size, cores)


def describe(tuning: Tuning, module: ModuleType, threads: int | None) -> str:
    """Return one line: what was decided, and what the user had decided."""
    one_host, pieces, fused = tuning.one_host, os.environ.get(PIECES), os.environ.get(FUSION)
    is_mpi = not tuning.nccl and module.mpi_enabled()
    hint = "; Open MPI's shared memory is several times faster: install it, then `hvdtrain build`"
    words = [
        f"{module.size()} ranks on {'1 host' if one_host else 'several hosts'}",
        tuning.device and f"computing on {tuning.device}",
        tuning.nccl and tuning.gpu_path,
        "NCCL" if tuning.nccl else "Open MPI" if is_mpi else "Gloo over TCP" + hint * one_host,
        is_mpi and one_host and pieces and f"shared memory in pieces of {_kib(pieces)}",
        threads and f"{threads} thread{'s' * (threads > 1)} a rank",
        f"cycle {os.environ.get(CYCLE, '1')} ms",
        fused and ("no fusion" if fused == "0" else f"tensors up to {_kib(fused)} fused"),
        tuning.keeps_memory and "freed memory kept",
        tuning.put_off and f"{tuning.put_off} loaded when needed",
        tuning.yours and "yours: " + ", ".join(tuning.yours),
    ]
    return ", ".join(str(word) for word in words if word)


def keep_freed_memory(*, torch: bool) -> bool:
    """Let glibc hold freed memory for the next step; return whether it does.

    A step frees its activations and gradients, and the next one allocates them again. What was given back in between is
    faulted in again page by page: 20 of an MLP's 110 ms. HVDTRAIN_KEEP_MEMORY=0 and the user's own settings (MALLOC_*,
    GLIBC_TUNABLES) leave malloc alone.
    """
    mallopt = _mallopt()
    if mallopt is None:
        return False
    # Older versions of glibc take no more than the second.
    done = any(mallopt(_M_MMAP_THRESHOLD, limit) == 1 for limit in (_NEARLY_ALL_BLOCKS, _SMALL_BLOCKS))
    if done and not torch:
        mallopt(_M_ARENA_MAX, 1)  # TensorFlow and JAX allocate on several threads, each with a heap that is given back
    return done and bool(mallopt(_M_TRIM_THRESHOLD, -1) == 1)


def return_large_blocks() -> bool:
    """Let glibc return freed blocks of 8 MiB or more to the system; return whether it does.

    For a training that frees its gradients within a step: small blocks then take places in the memory that
    `keep_freed_memory` holds, and the next gradients need new memory.
    """
    mallopt = _mallopt()
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCKS) == 1


def _mallopt() -> Callable[[int, int], int] | None:
    """Return glibc's function; None where the user has chosen malloc's settings, or there is another malloc."""
    own = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if own or os.environ.get(KEEP_MEMORY) == "0":
        return None
    try:
        os.confstr("CS_GNU_LIBC_VERSION")  # musl has a mallopt of no effect
        return ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, ValueError):
        return None


def _has_room_for(ranks: int) -> bool:
    """Return whether ranks of this host can talk through shared memory; else TCP must stay as a way round it."""
    try:
        return shutil.disk_usage("/dev/shm").free >= ranks * _SHARED_BYTES_A_RANK
    except OSError:
        return False


def share_of_cores(module: ModuleType, host: Host) -> float:
    """Return how many of its cores are this rank's share; a collective of all ranks."""
    cores = sorted(core for core in os.sched_getaffinity(0) if core < _MOST_CORES)
    mask = np.zeros(_MOST_CORES, np.uint8)
    mask[cores] = 1
    mine = np.concatenate([np.frombuffer(devices.host_id(), np.uint8), mask])
    rows = host.run(module, "allgather", mine, name="hvdtrain.cores").reshape(-1, len(mine))
    here = rows[(rows[:, :16] == mine[:16]).all(axis=1), 16:]
    ranks = here.sum(axis=0, dtype=np.int64)  # on each core
    limit = _time_limit() / int(module.local_size())
    return min(float((1 / ranks[cores]).sum()), limit)


def usable_cores() -> int:
    """Return the number of cores that this process may use: its affinity, or its container's share if that is less."""
    return max(1, int(min(len(os.sched_getaffinity(0)), _time_limit())))


def _time_limit() -> float:
    """Return how many cores' time this container may use; infinite where there is no limit (cgroup v2, then v1)."""
    for files in _QUOTA_AND_PERIOD:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            quota, period = (int(number) for file in files for number in Path(file).read_text().split())
            if quota > 0:
                return quota / period
    return float("inf")


def _kib(value: str) -> str:
    return f"{int(value) // 1024} KiB" if value.isdecimal() else value
