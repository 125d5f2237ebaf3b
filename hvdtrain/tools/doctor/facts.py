"""What is on this machine that distributed training depends on. Reads files and asks programs; imports no framework."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hvdtrain import __version__
from hvdtrain.distributed import launch_environment
from hvdtrain.horovod_build import find, installed
from hvdtrain.horovod_build.frameworks import find_tensorflow, find_torch
from hvdtrain.system import open_mpi


@dataclass(frozen=True)
class Facts:
    """One machine and one environment, as found.

    Attributes:
        versions: of Python, hvdtrain, horovod, torch, tensorflow, keras, jax and NCCL; only what is installed.
        cuda: CUDA version each framework was built for; "" for a CPU build.
        horovod_for: framework versions that the installed Horovod was built for.
        horovod_planes: what Horovod's libraries were linked with: "gloo", "mpi", "nccl".
        horovod_by_hvdtrain: True if `hvdtrain build` made this Horovod.
        horovod_has_other_changes: True if that was another version of it, which changed Horovod otherwise.
        horovod_proven: True if `hvdtrain build` proved it in this environment.
        mpi: first line of `mpirun --version`, "" without an mpirun.
        horovod_mpi: version of the Open MPI that Horovod was built with, "" where nobody says.
        horovod_cuda: CUDA version with which it takes tensors on GPUs, "" where it does not, or nobody says.
        gpus: one line a GPU: name and memory; none where CUDA_VISIBLE_DEVICES hides them all.
        gpu_driver: NVIDIA driver version, "" without one.
        interfaces: {name: IPv4 address} of the network interfaces that are up.
        cpu_cores: logical cores of the machine.
        cpu_allowed: cores that this process may use.
        shared_memory_mib: size of /dev/shm, None where there is none.
        keras_backend: the backend that KERAS_BACKEND or Keras's default names.
        torch_distributed: True if the environment would let torch.distributed start by itself.
    """

    versions: dict[str, str]
    cuda: dict[str, str] = field(default_factory=dict)
    horovod_for: dict[str, str] = field(default_factory=dict)
    horovod_planes: tuple[str, ...] = ()
    horovod_by_hvdtrain: bool = True
    horovod_has_other_changes: bool = False
    horovod_proven: bool = False
    mpi: str = ""
    horovod_mpi: str = ""
    horovod_cuda: str = ""
    gpus: tuple[str, ...] = ()
    gpu_driver: str = ""
    interfaces: dict[str, str] = field(default_factory=dict)
    cpu_cores: int = 1
    cpu_allowed: int = 1
    shared_memory_mib: int | None = None
    keras_backend: str = "tensorflow"
    torch_distributed: bool = False

    @property
    def frameworks(self) -> tuple[str, ...]:
        """The installed frameworks that Horovod can be built for."""
        return tuple(name for name in ("torch", "tensorflow") if name in self.versions)

    @property
    def open_mpi(self) -> tuple[int, ...] | None:
        """Open MPI's version as numbers, None if there is no mpirun or it is another MPI's."""
        version = open_mpi.version_in(self.mpi)
        return tuple(map(int, re.findall(r"\d+", version)[:3])) or None

    def serves(self, framework: str) -> bool:
        """True if the installed Horovod was built for exactly the installed version of `framework`."""
        return framework in self.versions and self.horovod_for.get(framework) == self.versions[framework]


def gather() -> Facts:
    """Look at everything once."""
    frameworks = [found for found in (find_torch(), find_tensorflow()) if found]
    versions = {"python": platform.python_version(), "hvdtrain": __version__}
    versions |= {name: version for name in ("horovod",) if (version := _distribution(name))}
    versions |= {framework.name: framework.version for framework in frameworks}
    versions |= {name: version for name in ("keras", "jax") if (version := _distribution(name))}
    if nccl := _nccl_version():
        versions["nccl"] = nccl
    gpus, driver = _gpus()
    shm = Path("/dev/shm")
    return Facts(
        versions=versions,
        cuda={framework.name: framework.cuda for framework in frameworks},
        horovod_for=installed.built_for(),
        horovod_planes=_horovod_planes(),
        horovod_by_hvdtrain=bool(installed.record()),
        horovod_has_other_changes=installed.has_other_changes(),
        horovod_proven=installed.record().get("proven") is True,
        mpi=_first_line(find.output_of([open_mpi.program("mpirun") or "mpirun", "--version"])),
        horovod_mpi=str(installed.record().get("mpi", "")),
        horovod_cuda=str(installed.record().get("cuda", "")),
        gpus=gpus,
        gpu_driver=driver,
        interfaces=_interfaces(),
        cpu_cores=os.cpu_count() or 1,
        cpu_allowed=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        shared_memory_mib=shutil.disk_usage(shm).total >> 20 if shm.is_dir() else None,
        keras_backend=launch_environment.keras_backend(),
        torch_distributed="MASTER_ADDR" in os.environ and "WORLD_SIZE" in os.environ,
    )


def _distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(text: str | None) -> str:
    return text.strip().splitlines()[0].strip() if text and text.strip() else ""


def _horovod_planes() -> tuple[str, ...]:
    """Return Horovod's data planes: as `hvdtrain build` wrote them down, else read off the native libraries."""
    if said := installed.record().get("data_planes"):
        return tuple(str(said).split(","))
    folder = installed.package_folder("horovod")
    libraries = sorted(folder.glob("*/mpi_lib*.so")) if folder else []
    if not libraries:
        return ()
    # One build made all of them: the first tells.
    content = libraries[0].read_bytes()
    marks = {"gloo": b"GlooContext", "mpi": b"libmpi.so", "nccl": b"ncclAllReduce"}
    return tuple(plane for plane, mark in marks.items() if mark in content)


def _nccl_version() -> str | None:
    for major in ("13", "12", "11"):
        if version := _distribution(f"nvidia-nccl-cu{major}"):
            return version
    found = find.find_nccl()
    return found.version if found else None


def _gpus() -> tuple[tuple[str, ...], str]:
    query = "--query-gpu=name,memory.total,driver_version"
    text = find.output_of(["nvidia-smi", query, "--format=csv,noheader"]) or ""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == 3]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    gpus = () if hidden else tuple(f"{name}, {memory}" for name, memory, _ in rows)
    return gpus, rows[0][2] if rows else ""


def _interfaces() -> dict[str, str]:
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name: address.address
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for address in addresses
        if name in up and address.family == socket.AF_INET
    }
