"""What prevents training or slows it: when a rule applies, why, and the one command that fixes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hvdtrain.horovod_build.find import Framework, is_tested
from hvdtrain.horovod_build.probe import Probe
from hvdtrain.system import open_mpi
from hvdtrain.system.toolchain import OLDEST_DRIVER
from hvdtrain.tools.doctor.facts import Facts

Level = Literal["error", "warning"]
# Docker's default is 64 MiB; torch's data loaders and Open MPI's shared-memory transport want more.
_MIN_SHARED_MEMORY_MIB = 256

# Of each rule, under a name that scripts may read in the JSON: how grave it is, and the next command to type.
RULES: dict[str, tuple[Level, str]] = {
    "no-framework": ("error", "pip install 'hvdtrain[torch]'"),
    "no-horovod": ("error", "hvdtrain build"),
    "horovod-for-other-versions": ("error", "hvdtrain build"),
    "horovod-for-nothing": ("error", "hvdtrain build"),
    "other-open-mpi": ("error", "hvdtrain build"),
    "not-open-mpi": ("error", "hvdtrain build --without mpi"),
    "no-mpirun": ("error", "pip install 'hvdtrain[mpi]' && hvdtrain build"),
    "gpus-without-operations": ("error", "hvdtrain build"),
    "keras-2": ("error", "pip install --upgrade 'keras>=3'"),
    "keras-backend-missing": ("warning", "export KERAS_BACKEND=torch"),
    "horovod-without-framework": ("warning", "hvdtrain build"),
    "keras-torch-ddp": ("warning", "unset MASTER_ADDR WORLD_SIZE"),
    "old-gpu-driver": ("error", f"apt-get install nvidia-driver-{OLDEST_DRIVER}"),
    "idle-gpus": ("warning", "hvdtrain build"),
    "horovod-from-elsewhere": ("warning", "hvdtrain build"),
    "horovod-by-other-hvdtrain": ("warning", "hvdtrain build"),
    "untested-versions": ("warning", "hvdtrain build"),
    "little-shared-memory": ("warning", "docker run --shm-size=1g ..."),
    "narrow-affinity": ("warning", "taskset -c 0-1 ..."),
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
    return [
        Verdict(
            f"allreduce-{probe.framework}-{probe.plane}",
            "error",
            f"a live allreduce of {probe.ranks} ranks with {probe.framework} over {probe.plane} failed: {probe.error}",
            " ".join(probe.command),
        )
        for probe in probes
        if not probe.ok
    ]


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
    gpus, driver = f"{len(facts.gpus)} GPU(s)", facts.gpu_driver
    for_13 = [f"{name} {facts.versions[name]}" for name in facts.frameworks if facts.cuda.get(name, "")[:3] == "13."]
    major = driver.split(".")[0]
    if for_13 and major.isdigit() and int(major) < OLDEST_DRIVER:
        why = f"the NVIDIA driver is {driver}, and {' and '.join(for_13)} needs {OLDEST_DRIVER} or newer (CUDA 13)"
        yield "old-gpu-driver", why
    if facts.gpus and facts.horovod_for:
        has_nccl = "nccl" in facts.horovod_planes
        if facts.frameworks and not any(map(facts.cuda.get, facts.frameworks)):
            yield "idle-gpus", f"{gpus}, but the installed frameworks are CPU builds"
        elif facts.cuda.get("torch") and not facts.horovod_cuda and not has_nccl:
            why = (
                f"{gpus}, on which torch would compute, but Horovod was built without GPU operations: "
                'hvdtrain.init() refuses that, unless CUDA_VISIBLE_DEVICES="" hides them'
            )
            yield "gpus-without-operations", why
        elif not has_nccl:
            why = f"{gpus}, but Horovod was built without NCCL: gradients would travel through host memory"
            yield "idle-gpus", why
    size = facts.shared_memory_mib
    if size is not None and size < _MIN_SHARED_MEMORY_MIB:
        why = f"/dev/shm holds {size} MiB: data loader workers and Open MPI's local transport may run out of it"
        yield "little-shared-memory", why
    if facts.cpu_allowed < 2 <= facts.cpu_cores:
        why = f"this process may use {facts.cpu_allowed} of {facts.cpu_cores} cores: local ranks would share one"
        yield "narrow-affinity", why
