"""What prevents training or slows it, as data: when it applies, why, and the one command that fixes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hvdtrain.horovod_build.frameworks import Framework, is_tested
from hvdtrain.horovod_build.probe import Probe
from hvdtrain.system import open_mpi
from hvdtrain.system.toolchain import OLDEST_DRIVER
from hvdtrain.tools.doctor.facts import Facts

Level = Literal["error", "warning"]
# Docker's default is 64 MiB; torch's data loaders and Open MPI's shared-memory transport want more.
_MIN_SHARED_MEMORY_MIB = 256


@dataclass(frozen=True)
class Verdict:
    """One finding. An "error" means that training would not work."""

    name: str
    level: Level
    reason: str
    cure: str


@dataclass(frozen=True)
class Rule:
    """A known bad state."""

    name: str  # short and stable, for scripts that read the JSON
    level: Level
    reason: Callable[[Facts], str]  # why the rule applies to these facts, "" where it does not
    cure: str  # the next command to type


def _no_framework(facts: Facts) -> str:
    if facts.frameworks:
        return ""
    why = ", and JAX's gradients travel through the Horovod of either" if "jax" in facts.versions else ""
    return f"neither torch nor tensorflow is installed{why}"


def _no_horovod(facts: Facts) -> str:
    missing = facts.frameworks and "horovod" not in facts.versions
    return "Horovod is not installed: every process would train alone" if missing else ""


def _other_versions(facts: Facts) -> str:
    for framework in facts.frameworks:
        built = facts.horovod_for.get(framework)
        if built and not facts.serves(framework):
            return (
                f"Horovod was built for {framework} {built}, but {framework} {facts.versions[framework]} is installed"
            )
    return ""


def _without_framework(facts: Facts) -> str:
    left_out = [each for each in facts.frameworks if facts.horovod_for and each not in facts.horovod_for]
    return f"{' and '.join(left_out)} is installed, but Horovod was built without it" if left_out else ""


def _serves_nothing(facts: Facts) -> str:
    nothing = facts.frameworks and "horovod" in facts.versions and not facts.horovod_for
    return "Horovod is installed, but built for no framework" if nothing else ""


def _other_open_mpi(facts: Facts) -> str:
    built, found = facts.horovod_mpi, facts.open_mpi
    differ = built and found and open_mpi.major(built) != found[0]
    return f"Horovod was built with Open MPI {built}, which {facts.mpi} cannot launch" if differ else ""


def _other_mpi(facts: Facts) -> str:
    is_supported = facts.open_mpi is not None and facts.open_mpi[0] in open_mpi.SUPPORTED
    if "mpi" not in facts.horovod_planes or not facts.mpi or is_supported:
        return ""
    return f'Horovod has MPI built in, and horovodrun cannot drive this mpirun: "{facts.mpi}"'


def _no_mpirun(facts: Facts) -> str:
    missing = "mpi" in facts.horovod_planes and not facts.mpi
    return "Horovod has MPI built in, so horovodrun looks for an mpirun, and there is none on PATH" if missing else ""


def _built_elsewhere(facts: Facts) -> str:
    text = "this Horovod was not made by hvdtrain build: nothing says that it was proven on these frameworks"
    return text if facts.horovod_for and not facts.horovod_by_hvdtrain else ""


def _has_other_changes(facts: Facts) -> str:
    text = "another version of hvdtrain built this Horovod, with other changes to it than this one makes"
    return text if facts.horovod_has_other_changes else ""


def _untested(facts: Facts) -> str:
    for framework in facts.frameworks:
        proven = facts.horovod_proven and facts.serves(framework)
        if not proven and not is_tested(Framework(framework, facts.versions[framework])):
            return f"no test of hvdtrain ran on {framework} {facts.versions[framework]}, and no build was proven here"
    return ""


def _keras_2(facts: Facts) -> str:
    version = facts.versions.get("keras", "3")
    return f"hvdtrain.keras is for Keras 3, and keras {version} is installed" if version.split(".")[0] < "3" else ""


def _keras_backend(facts: Facts) -> str:
    missing = facts.frameworks and "keras" in facts.versions and facts.keras_backend not in facts.versions
    return f"Keras would use {facts.keras_backend}, which is not installed" if missing else ""


def _keras_ddp(facts: Facts) -> str:
    text = (
        "MASTER_ADDR and WORLD_SIZE are set: with torch.distributed initialised, Keras's torch trainer wraps itself in "
        "DistributedDataParallel and averages a second time"
    )
    return text if facts.torch_distributed and "keras" in facts.versions and facts.keras_backend == "torch" else ""


def _old_driver(facts: Facts) -> str:
    major = facts.gpu_driver.split(".")[0]
    built = [
        f"{name} {facts.versions[name]}" for name in facts.frameworks if facts.cuda.get(name, "").startswith("13.")
    ]
    if not built or not major.isdigit() or int(major) >= OLDEST_DRIVER:
        return ""
    return (
        f"the NVIDIA driver is {facts.gpu_driver}, and {' and '.join(built)} needs {OLDEST_DRIVER} or newer (CUDA 13)"
    )


def _idle_gpus(facts: Facts) -> str:
    if not facts.gpus or not facts.horovod_for:
        return ""
    if facts.frameworks and not any(facts.cuda.get(framework) for framework in facts.frameworks):
        return f"{len(facts.gpus)} GPU(s), but the installed frameworks are CPU builds"
    if "nccl" not in facts.horovod_planes and not _gpus_without_operations(facts):
        return (
            f"{len(facts.gpus)} GPU(s), but Horovod was built without NCCL: gradients would travel through host memory"
        )
    return ""


def _gpus_without_operations(facts: Facts) -> str:
    on_gpus = facts.gpus and facts.horovod_for and facts.cuda.get("torch")
    if not on_gpus or facts.horovod_cuda or "nccl" in facts.horovod_planes:
        return ""
    return (
        f"{len(facts.gpus)} GPU(s), on which torch would compute, but Horovod was built without GPU operations: "
        'hvdtrain.init() refuses that, unless CUDA_VISIBLE_DEVICES="" hides them'
    )


def _little_shared_memory(facts: Facts) -> str:
    size = facts.shared_memory_mib
    text = f"/dev/shm holds {size} MiB: data loader workers and Open MPI's local transport may run out of it"
    return text if size is not None and size < _MIN_SHARED_MEMORY_MIB else ""


def _narrow_affinity(facts: Facts) -> str:
    text = f"this process may use {facts.cpu_allowed} of {facts.cpu_cores} cores: local ranks would share one"
    return text if facts.cpu_allowed < 2 <= facts.cpu_cores else ""


RULES: tuple[Rule, ...] = (
    Rule("no-framework", "error", _no_framework, "pip install 'hvdtrain[torch]'"),
    Rule("no-horovod", "error", _no_horovod, "hvdtrain build"),
    Rule("horovod-for-other-versions", "error", _other_versions, "hvdtrain build"),
    Rule("horovod-for-nothing", "error", _serves_nothing, "hvdtrain build"),
    Rule("other-open-mpi", "error", _other_open_mpi, "hvdtrain build"),
    Rule("not-open-mpi", "error", _other_mpi, "hvdtrain build --without mpi"),
    Rule("no-mpirun", "error", _no_mpirun, "pip install 'hvdtrain[mpi]' && hvdtrain build"),
    Rule("gpus-without-operations", "error", _gpus_without_operations, "hvdtrain build"),
    Rule("keras-2", "error", _keras_2, "pip install --upgrade 'keras>=3'"),
    Rule("keras-backend-missing", "warning", _keras_backend, "export KERAS_BACKEND=torch"),
    Rule("horovod-without-framework", "warning", _without_framework, "hvdtrain build"),
    Rule("keras-torch-ddp", "warning", _keras_ddp, "unset MASTER_ADDR WORLD_SIZE"),
    Rule("old-gpu-driver", "error", _old_driver, f"apt-get install nvidia-driver-{OLDEST_DRIVER}"),
    Rule("idle-gpus", "warning", _idle_gpus, "hvdtrain build"),
    Rule("horovod-from-elsewhere", "warning", _built_elsewhere, "hvdtrain build"),
    Rule("horovod-by-other-hvdtrain", "warning", _has_other_changes, "hvdtrain build"),
    Rule("untested-versions", "warning", _untested, "hvdtrain build"),
    Rule("little-shared-memory", "warning", _little_shared_memory, "docker run --shm-size=1g ..."),
    Rule("narrow-affinity", "warning", _narrow_affinity, "taskset -c 0-1 ..."),
)


def judge(facts: Facts) -> list[Verdict]:
    """Return what the rules find, errors first."""
    verdicts = [Verdict(rule.name, rule.level, reason, rule.cure) for rule in RULES if (reason := rule.reason(facts))]
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
