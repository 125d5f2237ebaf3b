"""Say a run's numbers in sentences."""

from __future__ import annotations

from hvdtrain.telemetry.interval import WORDS
from hvdtrain.tools.quantities import format_time, three_digits
from hvdtrain.tools.report.numbers import Slowest, Summary

_EVEN = 0.05  # ranks that differ by less are equally fast
_SLOW = 0.1
_NAMES = {**WORDS, "reduction": "waiting for reduced gradients, and so for slower ranks"}


def sentences(summary: Summary) -> list[str]:
    """Return what there is to say, the most important first."""
    said = [_what(summary)]
    if summary.metrics:
        where = "At the end of the last epoch" if summary.epochs else "So far, within the first epoch"
        said.append(f"{where}: {', '.join(f'{name} {value:.4g}' for name, value in summary.metrics.items())}.")
    if summary.samples_per_s is not None:
        said.append(f"Median throughput: {three_digits(summary.samples_per_s)} samples/s over all ranks.")
    if summary.step_s is not None:
        said.append(_step(summary))
    if summary.slowest is not None and summary.settled:
        said.append(_slowest(summary.slowest))
    if summary.allreduce_floor_s is not None:
        floor = format_time(summary.allreduce_floor_s)
        said.append(f"Reducing the gradients takes at least {floor} a step (the allreduce floor).")
    return said


def _what(summary: Summary) -> str:
    where = _count(summary.ranks, "rank") if summary.ranks else "An unknown number of ranks"
    if summary.hosts:
        where += f" on {_count(summary.hosts, 'host')}"
    starts = f", in {summary.starts} starts" if summary.starts > 1 else ""
    took = f" in {format_time(summary.seconds)}" if summary.seconds else ""
    return f"{where}; {_count(summary.epochs, 'epoch')} ended, {_count(summary.global_step, 'step')}{took}{starts}."


def comparison(a: Summary, b: Summary) -> str:
    """Return which of two runs is faster, by how much, and in which part of a step; "" if that is not known."""
    if not a.step_s or not b.step_s:
        return ""
    times = f"({format_time(b.step_s)} against {format_time(a.step_s)})"
    ratio = b.step_s / a.step_s
    if abs(ratio - 1) < _EVEN:
        return f"A step takes both about as long {times}."
    slower = "longer" if ratio > 1 else "less"
    lost = {name: b.parts_s[name] - seconds for name, seconds in a.parts_s.items() if name in b.parts_s}
    most = max(lost, key=lambda part: abs(lost[part]), default=None)
    where = f" Most of the difference, {format_time(abs(lost[most]))}, is {_NAMES[most]}." if most else ""
    return f"A step of B takes {100 * abs(ratio - 1):.0f} % {slower} than one of A {times}.{where}"


def _step(summary: Summary) -> str:
    step = summary.step_s or 0.0
    shares = [
        f"{name} {format_time(seconds)}" + (f" ({100 * seconds / step:.0f} %)" if step else "")
        for name, seconds in summary.parts_s.items()
    ]
    largest = max(summary.parts_s, key=lambda part: summary.parts_s[part], default="")
    verdict = {
        "compute": " Most of it is computing.",
        "data": " Most of it is waiting for data: more DataLoader workers or faster storage would help.",
        "reduction": " Most of it is waiting for reduced gradients: for the network, or for a slower rank.",
        "other": " Most of it lies between steps: callbacks that do less, or less often, would help.",
    }.get(largest if summary.parts_s.get(largest, 0) > step / 2 else "", "")
    parts = ", ".join(shares)
    if not summary.settled:
        return f"Only the first step was recorded, which also compiles and connects: {format_time(step)}: {parts}."
    return f"A typical step takes {format_time(step)}: {parts}.{verdict}"


def _slowest(slowest: Slowest) -> str:
    whose = f"rank {slowest.rank}" + (f" on host {slowest.host}" if slowest.host else "")
    times = f"on average {format_time(slowest.own_s)} a step by itself, the median rank"
    times += f" {format_time(slowest.median_own_s)}"
    if slowest.above_median < _EVEN:
        return f"All ranks are about equally fast: the slowest, {whose}, takes {times}."
    others = ", and the others wait for it" if slowest.above_median >= _SLOW else ""
    above = f"{100 * slowest.above_median:.0f} % above the median"
    return f"The slowest is {whose}, {above}{others}: it takes {times}. It loses its time in {_NAMES[slowest.cause]}."


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
