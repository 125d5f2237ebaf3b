"""What is on this machine that distributed training depends on. Reads files and runs programs; imports no framework."""

from __future__ import annotations

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
from hvdtrain.horovod_build.find import find_tensorflow, find_torch
from hvdtrain.horovod_build.installed import version_of
from hvdtrain.system import open_mpi


@dataclass(frozen=True)
class Facts:
    """One machine and one environment, as found."""

    versions: dict[str, str]  # of what is installed: Python, hvdtrain, horovod, torch, tensorflow, keras, jax, NCCL
    cuda: dict[str, str] = field(default_factory=dict)  # that each framework was built for; "" for a CPU build
    horovod_for: dict[str, str] = field(default_factory=dict)  # framework versions that Horovod was built for
    horovod_planes: tuple[str, ...] = ()  # that its libraries were linked with: "gloo", "mpi", "nccl"
    horovod_by_hvdtrain: bool = True  # `hvdtrain build` made it
    horovod_has_other_changes: bool = False  # with another version of hvdtrain, which changed Horovod otherwise
    horovod_proven: bool = False  # `hvdtrain build` proved it in this environment
    mpi: str = ""  # first line of `mpirun --version`, "" without an mpirun
    horovod_mpi: str = ""  # version of the Open MPI that Horovod was built with, "" where it is not recorded
    horovod_cuda: str = ""  # CUDA version with which it takes tensors on GPUs, "" where it does not, or is not recorded
    gpus: tuple[str, ...] = ()  # name and memory of each; none where CUDA_VISIBLE_DEVICES hides them all
    gpu_driver: str = ""  # NVIDIA driver version, "" without one
    interfaces: dict[str, str] = field(default_factory=dict)  # {name: IPv4 address} of those that are up
    cpu_cores: int = 1  # logical cores of the machine
    cpu_allowed: int = 1  # cores that this process may use
    shared_memory_mib: int | None = None  # size of /dev/shm, None where there is none
    keras_backend: str = "tensorflow"  # that KERAS_BACKEND or Keras's default names
    torch_distributed: bool = False  # the environment would let torch.distributed start by itself

    @property
    def frameworks(self) -> tuple[str, ...]:
        """The installed frameworks that Horovod can be built for."""
        return tuple(name for name in ("torch", "tensorflow") if name in self.versions)

    @property
    def open_mpi(self) -> tuple[int, ...] | None:
        """Open MPI's version as numbers, None if there is no mpirun or it is another MPI's."""
        version = open_mpi.version_in(self.mpi)
        return tuple(map(int, re.findall(r"\d+", version)[:3])) or None

    def builds(self) -> dict[str, str]:
        """Return versions, those of frameworks with what they were built for: "2.13.0 (CUDA 13.0)"."""
        kinds = {name: f" (CUDA {cuda})" if cuda else " (CPU)" for name, cuda in self.cuda.items()}
        return {name: version + kinds.get(name, "") for name, version in self.versions.items()}

    def hardware(self) -> dict[str, str]:
        """Return what the machine has, in words."""
        shm = self.shared_memory_mib
        return {
            "GPUs": "; ".join(self.gpus) or "none",
            "GPU driver": self.gpu_driver or "none",
            "CPU cores": f"{self.cpu_allowed} of {self.cpu_cores} usable",
            "shared memory": "none" if shm is None else f"{shm} MiB",
        }

    def build_of_horovod(self) -> dict[str, str]:
        """Return what the installed Horovod was built with, in words."""
        return {
            "Horovod built for": ", ".join(f"{name} {version}" for name, version in self.horovod_for.items())
            or "nothing",
            "data planes": ", ".join(self.horovod_planes) or "none",
            "MPI": self.mpi or "none",
        }

    def serves(self, framework: str) -> bool:
        """True if the installed Horovod was built for exactly the installed version of `framework`."""
        return framework in self.versions and self.horovod_for.get(framework) == self.versions[framework]


def gather() -> Facts:
    """Look at everything once."""
    frameworks = [found for found in (find_torch(), find_tensorflow()) if found]
    wheels = (version_of(f"nvidia-nccl-cu{major}") for major in ("13", "12", "11"))
    nccl = next(filter(None, wheels), "") or ((found := find.find_nccl()) and found.version) or ""
    versions = {"python": platform.python_version(), "hvdtrain": __version__, "horovod": version_of("horovod")}
    versions |= {framework.name: framework.version for framework in frameworks}
    versions |= {"keras": version_of("keras"), "jax": version_of("jax"), "nccl": nccl}
    gpus, driver = _gpus()
    shm, record = Path("/dev/shm"), installed.record()
    return Facts(
        versions={name: version for name, version in versions.items() if version},
        cuda={framework.name: framework.cuda for framework in frameworks},
        horovod_for=installed.built_for(),
        horovod_planes=_horovod_planes(),
        horovod_by_hvdtrain=bool(record),
        horovod_has_other_changes=installed.has_other_changes(),
        horovod_proven=record.get("proven") is True,
        mpi=(find.output_of([open_mpi.program("mpirun") or "mpirun", "--version"]) or "").strip().partition("\n")[0],
        horovod_mpi=str(record.get("mpi", "")),
        horovod_cuda=str(record.get("cuda", "")),
        gpus=gpus,
        gpu_driver=driver,
        interfaces=_interfaces(),
        cpu_cores=os.cpu_count() or 1,
        cpu_allowed=len(os.sched_getaffinity(0)),
        shared_memory_mib=shutil.disk_usage(shm).total >> 20 if shm.is_dir() else None,
        keras_backend=launch_environment.keras_backend(),
        torch_distributed="MASTER_ADDR" in os.environ and "WORLD_SIZE" in os.environ,
    )


def _horovod_planes() -> tuple[str, ...]:
    """Return Horovod's data planes: as `hvdtrain build` wrote them down, else read off the native libraries."""
    if said := installed.record().get("data_planes"):
        return tuple(str(said).split(","))
    folder = installed.package_folder("horovod")
    libraries = sorted(folder.glob("*/mpi_lib*.so")) if folder else []
    if not libraries:
        return ()
    # One build made all of them: one is enough.
    content = libraries[0].read_bytes()
    marks = {"gloo": b"GlooContext", "mpi": b"libmpi.so", "nccl": b"ncclAllReduce"}
    return tuple(plane for plane, mark in marks.items() if mark in content)


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
