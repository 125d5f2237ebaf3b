"""The command: checks the options, starts the ranks, and combines their reports."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hvdtrain.distributed.launch_environment import count_ranks
from hvdtrain.distributed.tuning import usable_cores
from hvdtrain.errors import UsageError
from hvdtrain.launch import job_environment
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.system import scratch
from hvdtrain.system.quantities import format_time, parse_rate
from hvdtrain.telemetry import step_times
from hvdtrain.telemetry.step_times import RankReport
from hvdtrain.tools.bench import advice, report, sweep, worker
from hvdtrain.tools.bench.launch import BenchError, LaunchOutcome, parse_hosts, run_ranks
from hvdtrain.tools.bench.report import Steps, collect, from_script

__all__ = ["BenchError", "BenchOptions", "run"]

QUICK: dict[str, Any] = {"max_bytes": 1 << 20, "budget_s": 0.1, "steps": 8, "hidden": 256}
SCRIPT_STEPS = 100
# One thread per rank, so that figures of different numbers of ranks compare; what the user has set stays.
_ONE_THREAD = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")

_NOTES = {
    "torch": "Data wait: from the end of optimizer.step to the next forward pass, without callbacks of the Trainer.",
    "keras/jax": "On JAX bench waits for each step, so that fetching data does not overlap with the step before.",
    "keras/tensorflow": "On TensorFlow the graph reads the clock when the batch, the last gradient and the last sum "
    "are there: what it computes meanwhile, such as updates of the weights that came first, counts as wait.",
}


@dataclass(frozen=True)
class BenchOptions:
    """The command line's options; see `hvdtrain bench --help`."""

    ranks: int = 2
    hosts: str | None = None
    framework: str | None = None
    max_bytes: int | None = None
    link: str | None = None
    quick: bool = False
    steps: int | None = None
    timeout_s: float = 300.0
    script: Path | None = None
    arguments: Sequence[str] = ()
    as_json: bool = False


def run(options: BenchOptions) -> None:
    """Measure and print; UsageError for options that are wrong, BenchError for a run that failed."""
    spec = parse_hosts(options.hosts, ranks=options.ranks, cores=usable_cores())
    _check(options)
    link = None if options.link is None else parse_link(options.link)
    job_environment.check_place("hvdtrain bench")
    result = bench_script(options.script, options, spec, link) if options.script else bench_machine(options, spec, link)
    if options.as_json:
        print(json.dumps(report.as_json(result), indent=2))
    else:
        report.show(result, Console(highlight=False, soft_wrap=True))


def _check(options: BenchOptions) -> None:
    if not (math.isfinite(options.timeout_s) and options.timeout_s > 0):
        raise UsageError(f"--timeout must be above zero seconds and finite. Received: {options.timeout_s:g}")
    until_end = options.steps == 0 and options.script is not None
    if options.steps is not None and options.steps < step_times.MIN_STEPS and not until_end:
        raise UsageError(f"--steps must be at least {step_times.MIN_STEPS}. Received: {options.steps}")
    if options.script is None:
        if options.arguments:
            raise UsageError(f"arguments are a script's: give --script. Received: {' '.join(options.arguments)}")
        if options.max_bytes is not None:
            sweep.sizes(options.max_bytes)
    else:
        if options.framework or options.max_bytes is not None or options.quick:
            raise UsageError("--framework, --max-bytes and --quick are for the standard model, not for --script")
        if not options.script.is_file():
            raise UsageError(f"--script must be a file. There is none at {options.script}")


def parse_link(text: str) -> float:
    """Return the bytes a second of a link such as "25Gb/s" (bits) or "3GB/s" (bytes)."""
    try:
        rate = parse_rate(text)
    except ValueError as problem:
        raise UsageError(f"--link: {problem}") from None
    if not 0 < rate < math.inf:
        raise UsageError(f"--link must be above zero and finite. Received: --link {text}")
    return rate


def bench_machine(options: BenchOptions, spec: LaunchSpec, link: float | None) -> report.Result:
    """Sweep allreduce over sizes, then time the steps of the standard model."""
    framework = options.framework or next(filter(importlib.util.find_spec, ("torch", "keras")), "")
    if not framework:
        raise BenchError("Neither torch nor keras is installed to measure with. Install one of them")
    given = {"max_bytes": options.max_bytes, "steps": options.steps}
    chosen = (QUICK if options.quick else {}) | {name: value for name, value in given.items() if value is not None}
    plan = worker.WorkerPlan(framework, **chosen)
    environment = {name: os.environ.get(name, "1") for name in _ONE_THREAD}
    text = json.dumps(dataclasses.asdict(plan))
    _announce(f"{count_ranks(spec.ranks)}, {framework}, at most {options.timeout_s:g} s")
    program, limit_s = ["-m", "hvdtrain.tools.bench.worker", text], options.timeout_s
    outcome = run_ranks(spec, program, environment=environment, timeout_s=limit_s, mark=worker.MARK, answers=1)
    found = _report_of(outcome, limit_s)
    reports = [RankReport.from_json(each) for each in found["ranks"]]
    steps = collect(reports, name="the standard model", ranks=spec.ranks)
    on_memory = len(spec.hosts) <= 1 and steps.slowest.facts.get("device") == "cpu"
    sizes = [sweep.Point.from_dict(each) for each in found["points"]]
    points = [with_floor(each, ranks=spec.ranks, link=link, on_memory=on_memory) for each in sizes]
    width = f"{worker.INPUTS}-{plan.hidden}-{plan.hidden}-{worker.CLASSES}"
    return report.Result(
        title=f"{framework}, {count_ranks(spec.ranks)}; steps: MLP {width}, batch {plan.batch_size} a rank",
        steps=steps,
        advice=advice.advise(advice_facts(steps, spec=spec, link=link, fit=sweep.fit(points))),
        points=points,
        fit=sweep.fit(points),
        link_bytes_per_s=link,
        notes=[*floor_notes(points, link, spec), *step_notes(steps)],
    )


def bench_script(script: Path, options: BenchOptions, spec: LaunchSpec, link: float | None) -> report.Result:
    """Run the user's own script with its steps recorded, and its checkpoints in a temporary folder."""
    steps_asked = SCRIPT_STEPS if options.steps is None else options.steps
    name = script.name
    until = f"{steps_asked} steps" if steps_asked else "its end"
    _announce(f"{name} on {count_ranks(spec.ranks)} until {until}, at most {options.timeout_s:g} s")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-", ignore_cleanup_errors=True) as folder:
        environment = {step_times.VARIABLE: str(steps_asked), scratch.VARIABLE: folder}
        line, limit_s = [str(script), *options.arguments], options.timeout_s
        mark, ranks = step_times.MARK, spec.ranks
        outcome = run_ranks(spec, line, environment=environment, timeout_s=limit_s, mark=mark, answers=ranks)
    steps = from_script(outcome, name=name, ranks=ranks, timeout_s=limit_s)
    return report.Result(
        title=f"{name}, {count_ranks(spec.ranks)}, {steps.slowest.facts.get('framework', '')}",
        steps=steps,
        advice=advice.advise(advice_facts(steps, spec=spec, link=link, fit=None)),
        link_bytes_per_s=link,
        notes=step_notes(steps),
    )


def _announce(text: str) -> None:
    print(f"hvdtrain bench: {text}", file=sys.stderr, flush=True)


def _report_of(outcome: LaunchOutcome, timeout_s: float) -> dict[str, Any]:
    """Return what rank 0 printed."""
    found: list[dict[str, Any]] = outcome.reports(worker.MARK, json.loads)
    if not found:
        why = f"was ended after {timeout_s:g} s (--timeout)" if outcome.status is None else "failed"
        raise BenchError(f"the measurement {why}; {outcome.last_words()}")
    return found[0]


def advice_facts(steps: Steps, *, spec: LaunchSpec, link: float | None, fit: sweep.Fit | None) -> advice.StepFacts:
    """Return what the rules judge: the slowest rank's step, whose exposed communication is communication alone."""
    slowest, size = steps.slowest, len(steps.ranks)
    step, whole = slowest.summary.step_s, slowest.summary.step_s.median or 1.0
    names = {field.name for field in dataclasses.fields(advice.StepFacts)}
    return advice.StepFacts(
        **{name: value for name, value in slowest.facts.items() if name in names},
        ranks=size,
        hosts=max(len(spec.hosts), 1),
        local_ranks=slowest.facts.get("local_size", size),
        noise=(step.high - step.low) / whole,
        communication=slowest.summary.communication_s / whole,
        data=slowest.summary.data_s / whole,
        data_s=slowest.summary.data_s,
        slowest=slowest.rank,
        lag=(slowest.own_s - steps.fastest.own_s) / whole,
        alpha_s=fit.alpha_s if fit else 0.0,
        beta_s_per_byte=fit.beta_s_per_byte if fit else 0.0,
        link_bytes_per_s=link or 0.0,
    )


def with_floor(point: sweep.Point, *, ranks: int, link: float | None, on_memory: bool) -> sweep.Point:
    """Return the point with its floor: over the link where one was named, else over memory, if that is all there is."""
    speed = link or (point.copy_bytes_per_s.median if on_memory else None)
    if speed is None:
        return point
    return dataclasses.replace(point, floor_s=sweep.moved_bytes(point.num_bytes, ranks) / speed)


def floor_notes(points: Sequence[sweep.Point], link: float | None, spec: LaunchSpec) -> list[str]:
    """Say what the floor stands on, and how the line was fitted."""
    if not points:
        return ["One rank sends nothing: no allreduce was measured."]
    copy = points[-1].copy_bytes_per_s
    if link:
        floor = f"Floor: 2(N-1)/N * bytes / the link's {link / 1e9:.3g} GB/s."
        if len(spec.hosts) <= 1:
            floor += " All ranks share this host: it is the floor of ranks that are joined by nothing but such a link."
        elif spec.ranks > (count := len(spec.hosts)):
            floor += (
                f" It is that of a flat ring over all N={spec.ranks} ranks. Summed within each host first, only "
                f"2(H-1)/H * bytes need cross the link of each of the H={count} hosts: "
                f"{(1 - 1 / count) / (1 - 1 / spec.ranks):.0%} of it."
            )
    elif points[0].floor_s is None:
        floor = "No floor: give the speed between GPUs or hosts, for example --link 25Gb/s."
    else:
        floor = (
            "Floor: 2(N-1)/N * bytes / the speed at which each rank, with one thread, copies as many bytes in memory "
            f"while all do: {copy.median / 1e9:.3g} GB/s ({copy.low / 1e9:.3g} - {copy.high / 1e9:.3g}) at the last "
            "size."
        )
    found = sweep.fit(points)
    line = [] if found is None else [
        f"Fit: {format_time(found.alpha_s)} + bytes / {1e-9 / found.beta_s_per_byte:.3g} GB/s, least squares of the "
        f"relative errors, the worst {found.worst:.0%}."
        if found.beta_s_per_byte
        else f"Fit: {format_time(found.alpha_s)} at any of these sizes."
    ]  # fmt: skip
    return [f"{floor} Times are the slowest rank's.", *line]


def step_notes(steps: Steps) -> list[str]:
    """Say how the parts of a step were measured, where that is not obvious."""
    facts = steps.slowest.facts
    note = _NOTES.get(facts.get("framework", ""), "")
    if note.startswith("On TensorFlow") and facts.get("device", "cpu") != "cpu":
        note += " On a GPU that is when they were handed over: see its profiler."
    return [note] if note else []
