"""What doctor found, as Markdown to paste into an issue: without names of users or hosts."""

from __future__ import annotations

import ipaddress
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from hvdtrain.horovod_build import installed
from hvdtrain.horovod_build.probe import Probe
from hvdtrain.system import log_filter, redact
from hvdtrain.tools.doctor.facts import Facts
from hvdtrain.tools.doctor.rules import Verdict

_PACKAGES = (
    "numpy", "safetensors", "typer", "rich", "psutil", "cloudpickle", "pyyaml", "setuptools", "packaging", "ray",
    "pyspark", "mpi4py",
)  # fmt: skip
# What steers frameworks, data planes and launchers. Of a scheduler's variables the numbers alone.
_RELEVANT = (
    "HOROVOD_", "HVDTRAIN_", "OMPI_MCA_", "PRTE_MCA_",
    "NCCL_", "GLOO_", "UCX_", "HWLOC_", "OMP_", "MKL_", "KMP_", "OPENBLAS_",
    "KERAS_", "TF_CPP_", "TF_NUM_", "TF_ENABLE_", "TF_FORCE_", "TF_GPU_", "TF_XLA_", "XLA_", "JAX_", "TORCH_",
    "PYTORCH_", "CUDA_", "NVIDIA_", "MALLOC_", "GLIBC_TUNABLES", "LD_LIBRARY_PATH", "LD_PRELOAD", "MASTER_ADDR",
    "WORLD_SIZE", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_CPUS_",
)  # fmt: skip
# The whole value names a machine, in whatever form.
_NAMES_HOSTS = ("HOST", "ADDR", "NODELIST", "_URL", "_URI")


def markdown(facts: Facts, probes: Sequence[Probe], verdicts: Sequence[Verdict]) -> str:
    """Return the report."""
    scrub = redact.Scrubber(keep={*facts.versions, "hvdtrain", "python"})
    lines = ["### hvdtrain doctor --report", ""]
    lines += ["User, host, home folder, network addresses and secrets are left out. Read it before you send it.", ""]
    lines += _findings(verdicts, scrub)
    record = {f"record: {name}": str(value) for name, value in installed.record().items() if value}
    by_hvdtrain = {"by hvdtrain build": "yes" if facts.horovod_by_hvdtrain else "no"}
    packages = {name: version for name in _PACKAGES if (version := installed.version_of(name))}
    lines += _table("Versions", facts.builds() | packages, str)
    lines += _table("Build of Horovod", facts.build_of_horovod() | by_hvdtrain | record, scrub)
    lines += _table("Machine", _machine(facts), scrub)
    lines += _table("Live allreduce", {f"{each.framework} over {each.plane}": str(each) for each in probes}, scrub)
    lines += _table("Network interfaces", dict(_interfaces(facts)), scrub)
    lines += _table("Environment", variables(log_filter.without_ours(os.environ)), scrub)
    return "\n".join(lines).rstrip() + "\n"


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter; what is secret or names a host is hidden."""
    chosen = {name: value for name, value in sorted(environment.items()) if name.startswith(_RELEVANT)}
    shown = redact.variables(chosen)
    return {name: redact.HIDDEN if any(w in name for w in _NAMES_HOSTS) else value for name, value in shown.items()}


def _findings(verdicts: Sequence[Verdict], scrub: Callable[[str], str]) -> list[str]:
    works = not any(verdict.level == "error" for verdict in verdicts)
    lines = ["**Training would work here.**" if works else "**Training would not work here.**", ""]
    for verdict in verdicts:
        lines += [f"- {verdict.level} `{verdict.name}`. Cure: `{scrub(verdict.cure)}`", ""]
        # A reason may hold the end of a rank's output. Indented, so that nothing in it is taken for Markdown.
        lines += [f"      {line}" for line in scrub(verdict.reason).splitlines()] + [""]
    return lines


def _table(title: str, rows: Mapping[str, str], scrub: Callable[[str], str]) -> list[str]:
    cells = [(name, scrub(value).replace("|", "\\|").replace("\n", " ")) for name, value in rows.items()]
    table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)] if cells else ["none"]
    return [f"#### {title}", "", *table, ""]


def _machine(facts: Facts) -> dict[str, str]:
    in_container = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
    return {
        "system": f"{_distribution()}, Linux {platform.release().partition('-')[0]}, {platform.machine()}",
        "C library": " ".join(platform.libc_ver()) or "unknown",
        "Python": f"{platform.python_implementation()}, {'a' if sys.prefix != sys.base_prefix else 'no'} venv",
        "container": "yes" if in_container else "not seen",
        "CPU": _cpu(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        **facts.hardware(),
        "Keras backend": facts.keras_backend,
    }


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        return "unknown"


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _interfaces(facts: Facts) -> Iterator[tuple[str, str]]:
    stats = psutil.net_if_stats()
    for name, address in facts.interfaces.items():
        found = ipaddress.ip_address(address)
        kind = "loopback" if found.is_loopback else "private IPv4" if found.is_private else "public IPv4"
        speed = f", {stats[name].speed} Mb/s" if name in stats and stats[name].speed > 0 else ""
        mtu = f", MTU {stats[name].mtu}" if name in stats else ""
        yield redact.interface(name), f"{kind}{speed}{mtu}"
