"""`hvdtrain doctor`: what is there, what is known to go wrong with it, and whether two processes can sum a number."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from rich.console import Console
from rich.markup import escape

from hvdtrain.horovod_build import cache, gpu_proof, gpu_record, installed, probe
from hvdtrain.horovod_build.errors import BuildError
from hvdtrain.horovod_build.gpu_proof import Proof
from hvdtrain.horovod_build.installed import Plane
from hvdtrain.system import log_filter, private_files, redact
from hvdtrain.system.machine_names import Scrubber
from hvdtrain.tools.doctor.facts import Facts, Verdict, gather, judge, judge_probes, judge_proof

__all__ = ["run"]

_PROBE_LIMIT_S = 90.0
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


def run(
    *, as_json: bool = False, report: bool = False, out: Path | None = None, allreduce: bool = True, gpu: bool = False
) -> int:
    """Look, judge, try, and print, or write Markdown for an issue to `out`; return 0 if training would work, else 1.

    With `gpu` train on this host's GPUs too, and keep the result for `init`.
    """
    facts = gather()
    if gpu:
        if why := why_no_proof(facts):
            raise BuildError(why)
        cache.cache_folder()  # an error before the minute that a proof takes
    verdicts = judge(facts)
    console = Console(soft_wrap=True, highlight=False)
    as_text = not as_json and not report
    if as_text:
        for name, value in _rows(facts).items():
            _print_row(console, name, value)
    probes = []
    for framework, plane, ranks in plan_probes(facts, verdicts) if allreduce else ():
        if report:
            print(f"hvdtrain doctor: trying an allreduce of {framework} over {plane}", file=sys.stderr)
        probes.append(probe.allreduce(framework, plane, ranks=ranks, timeout_s=_PROBE_LIMIT_S))
        if as_text:
            _print_row(console, f"allreduce {framework}", f"{plane}: {probes[-1]}")
    proof = None
    if gpu:
        if report:
            print("hvdtrain doctor: training on GPUs", file=sys.stderr)
        proof = gpu_proof.prove(ranks=gpu_proof.ranks_here())
        gpu_record.keep(proof)
        if as_text:
            _print_row(console, "training on GPUs", str(proof))
    verdicts += [*judge_probes(probes), *(judge_proof(proof) if proof else ())]
    verdicts.sort(key=lambda verdict: verdict.level != "error")
    works = not any(verdict.level == "error" for verdict in verdicts)
    if as_json:
        document = {
            "ok": works,
            "facts": dataclasses.asdict(facts),
            "allreduce": [dataclasses.asdict(each) for each in probes],
            "gpu_proof": dataclasses.asdict(proof) if proof else None,
            "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
        }
        print(json.dumps(redact.document(document), indent=2))
    elif report and out is None:
        print(markdown(facts, probes, verdicts, proof), end="")
    elif report and out is not None:
        private_files.write_text(out, markdown(facts, probes, verdicts, proof))
        print(f"wrote {out}: read it, then paste it into an issue")
    else:
        _print_verdicts(console, verdicts, tried=allreduce)
    return 0 if works else 1


def why_no_proof(facts: Facts) -> str:
    """Return why no training on GPUs can be proven here, and what to do; "" where it can."""
    if "nccl" not in facts.horovod_planes or not facts.serves("torch") or not facts.cuda.get("torch"):
        return "--gpu needs a CUDA build of torch, and Horovod built for it with NCCL. Type: hvdtrain build"
    ranks = gpu_proof.ranks_here()
    return f"--gpu needs two GPUs or more: {gpu_proof.too_few(ranks)}" if ranks < 2 else ""


def plan_probes(facts: Facts, verdicts: list[Verdict]) -> list[tuple[str, Plane, int]]:
    """Return (framework, data plane, ranks) of each allreduce worth trying."""
    # A framework that Horovod was not built for, and MPI that horovodrun cannot drive, have a verdict already: a
    # failing probe would only bury it.
    is_broken = {"other-open-mpi", "not-open-mpi", "no-mpirun"} & {verdict.name for verdict in verdicts}
    order: tuple[Plane, ...] = ("gloo", "nccl") if is_broken else ("mpi", "gloo", "nccl")
    if facts.horovod_lacks:
        return []
    served = {name: facts.cuda.get(name, "") for name in facts.frameworks if facts.serves(name)}
    return probe.plan(served, [plane for plane in order if plane in facts.horovod_planes], gpus=len(facts.gpus))


def _rows(facts: Facts) -> dict[str, str]:
    names = {"python": "Python", "tensorflow": "TensorFlow", "horovod": "Horovod", "nccl": "NCCL", "keras": "Keras"}
    interfaces = ", ".join(f"{name} {address}" for name, address in facts.interfaces.items()) or "none"
    rows = {names.get(name, name): version for name, version in facts.builds().items()}
    return rows | facts.build_of_horovod() | facts.hardware() | {"network interfaces": interfaces}


def _print_row(console: Console, name: str, value: str) -> None:
    console.print(f"[bold]{escape(name):<24}[/bold] {escape(value)}")


def _print_verdicts(console: Console, verdicts: list[Verdict], *, tried: bool) -> None:
    colours = {"error": "red", "warning": "yellow"}
    for verdict in verdicts:
        reason = escape(f"{redact.text(verdict.reason)}. [{verdict.name}]")
        console.print(f"[{colours[verdict.level]}]{verdict.level}[/]: {reason}")
        if verdict.level == "warning":
            console.print(f"  cure: {escape(verdict.cure)}")
    errors = [verdict for verdict in verdicts if verdict.level == "error"]
    if errors:
        # The first error's cure only: the others often go with it.
        console.print("Training would not work. Type next:")
        console.print(f"  {escape(errors[0].cure)}")
    elif tried:
        console.print("Training would work.")
    else:
        console.print("What is installed fits together; no allreduce was tried.")


def markdown(
    facts: Facts, probes: Sequence[probe.Probe], verdicts: Sequence[Verdict], proof: Proof | None = None
) -> str:
    """Return the report to paste into an issue: without names of users or hosts."""
    scrub = Scrubber(keep={*facts.versions, "hvdtrain", "python"})
    lines = ["### hvdtrain doctor --report", ""]
    lines += ["User, host, home folder, network addresses and secrets are left out. Read it before you send it.", ""]
    lines += _findings(verdicts, scrub)
    record = {f"record: {name}": str(value) for name, value in installed.record().items() if value}
    by_hvdtrain = {"by hvdtrain build": "yes" if facts.horovod_by_hvdtrain else "no"}
    packages = {name: version for name in _PACKAGES if (version := installed.version_of(name))}
    lines += _table("Versions", facts.builds() | packages, str)
    lines += _table("Build of Horovod", facts.build_of_horovod() | by_hvdtrain | record, scrub)
    lines += _table("Machine", _machine(facts), scrub)
    tried = {f"{each.framework} over {each.plane}": str(each) for each in probes}
    lines += _table("Live allreduce", tried | ({"training on GPUs": str(proof)} if proof else {}), scrub)
    lines += _table("Network interfaces", dict(_interfaces(facts, scrub)), scrub)
    environment = sorted(log_filter.without_ours(os.environ).items())
    chosen = redact.variables({name: value for name, value in environment if name.startswith(_RELEVANT)})
    hidden = {name: redact.HIDDEN for name in chosen if any(word in name for word in _NAMES_HOSTS)}
    lines += _table("Environment", chosen | hidden, scrub)
    return "\n".join(lines).rstrip() + "\n"


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
    cpu = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    in_container = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
    return {
        "system": f"{_distribution()}, Linux {platform.release().partition('-')[0]}, {platform.machine()}",
        "C library": " ".join(platform.libc_ver()) or "unknown",
        "Python": f"{platform.python_implementation()}, {'a' if sys.prefix != sys.base_prefix else 'no'} venv",
        "container": "yes" if in_container else "not seen",
        "CPU": next(cpu, ": unknown").partition(":")[2].strip(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        **facts.hardware(),
        "Keras backend": facts.keras_backend,
    }


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        return "unknown"


def _interfaces(facts: Facts, scrub: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    stats = psutil.net_if_stats()
    for name, address in facts.interfaces.items():
        found = ipaddress.ip_address(address)
        kind = "loopback" if found.is_loopback else "private IPv4" if found.is_private else "public IPv4"
        speed = f", {stats[name].speed} Mb/s" if name in stats and stats[name].speed > 0 else ""
        mtu = f", MTU {stats[name].mtu}" if name in stats else ""
        yield scrub(name), f"{kind}{speed}{mtu}"
