"""`hvdtrain doctor`: what is there, what is known to go wrong with it, and whether two processes can sum a number."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from hvdtrain.horovod_build import probe
from hvdtrain.horovod_build.installed import Plane
from hvdtrain.system import private_files, redact
from hvdtrain.tools.doctor.facts import Facts, gather
from hvdtrain.tools.doctor.rules import Verdict, judge, judge_probes

__all__ = ["run"]

_PROBE_LIMIT_S = 90.0


def run(*, as_json: bool = False, report: bool = False, out: Path | None = None, allreduce: bool = True) -> int:
    """Look, judge, try, and print, or write Markdown for an issue to `out`; return 0 if training would work, else 1."""
    facts = gather()
    verdicts = judge(facts)
    console = Console(soft_wrap=True, highlight=False)
    as_text = not as_json and not report
    if as_text:
        for name, value in _rows(facts).items():
            _print_row(console, name, value)
    probes = []
    for planned in plan_probes(facts, verdicts) if allreduce else ():
        if report:
            print(f"hvdtrain doctor: trying an allreduce of {planned[0]} over {planned[1]}", file=sys.stderr)
        probes.append(probe.allreduce(planned[0], planned[1], ranks=planned[2], timeout_s=_PROBE_LIMIT_S))
        if as_text:
            _print_row(console, f"allreduce {planned[0]}", f"{planned[1]}: {probes[-1]}")
    verdicts = sorted(verdicts + judge_probes(probes), key=lambda verdict: verdict.level != "error")
    works = not any(verdict.level == "error" for verdict in verdicts)
    if as_json:
        document = {
            "ok": works,
            "facts": dataclasses.asdict(facts),
            "allreduce": [dataclasses.asdict(each) for each in probes],
            "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
        }
        print(json.dumps(redact.document(document), indent=2))
    elif report:
        from hvdtrain.tools.doctor.issue import markdown

        text = markdown(facts, probes, verdicts)
        if out is None:
            print(text, end="")
        else:
            private_files.write_text(out, text)
            print(f"wrote {out}: read it, then paste it into an issue")
    else:
        _print_verdicts(console, verdicts, tried=allreduce)
    return 0 if works else 1


def plan_probes(facts: Facts, verdicts: list[Verdict]) -> list[tuple[str, Plane, int]]:
    """Return (framework, data plane, ranks) of each allreduce worth trying.

    A framework that Horovod was not built for, and MPI that horovodrun cannot drive, have a verdict already: a
    failing probe would only bury it.
    """
    is_broken = {"other-open-mpi", "not-open-mpi", "no-mpirun"} & {verdict.name for verdict in verdicts}
    order: tuple[Plane, ...] = ("gloo", "nccl") if is_broken else ("mpi", "gloo", "nccl")
    served = {name: facts.cuda.get(name, "") for name in facts.frameworks if facts.serves(name)}
    return probe.plan(served, [plane for plane in order if plane in facts.horovod_planes], gpus=len(facts.gpus))


def _rows(facts: Facts) -> dict[str, str]:
    names = {"python": "Python", "tensorflow": "TensorFlow", "horovod": "Horovod", "nccl": "NCCL", "keras": "Keras"}
    hardware = facts.hardware()
    interfaces = ", ".join(f"{name} {address}" for name, address in facts.interfaces.items()) or "none"
    rows = {names.get(name, name): version for name, version in facts.builds().items()} | facts.build_of_horovod()
    rows |= {name: hardware.pop(name) for name in ("GPUs", "GPU driver")}
    if not facts.gpu_driver:
        del rows["GPU driver"]
    return rows | {"network interfaces": interfaces} | hardware


def _print_row(console: Console, name: str, value: str) -> None:
    console.print(f"[bold]{escape(name):<24}[/bold] {escape(value)}")


def _print_verdicts(console: Console, verdicts: list[Verdict], *, tried: bool) -> None:
    colours = {"error": "red", "warning": "yellow"}
    for verdict in verdicts:
        colour = colours[verdict.level]
        console.print(f"[{colour}]{verdict.level}[/]: {escape(f'{redact.text(verdict.reason)}. [{verdict.name}]')}")
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
