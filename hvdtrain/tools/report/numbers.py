"""The numbers of a run: the sentences at the top of a report, and the values of its plots."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.system.quantities import format_time, three_digits
from hvdtrain.telemetry.interval import COMPARED_S, PARTS, WORDS, lower_median
from hvdtrain.telemetry.memory import Parts
from hvdtrain.tools.report.reading import RECORDED, Floats, Intervals, RecordedRun

# What History has besides metrics.
SPEEDS = ("samples_per_s", "seconds", "learning_rate")
_EVEN = 0.05  # ranks that differ by less are equally fast
_SLOW = 0.1
_REPEATED = ("arguments.", "data.")  # parts of config.json that may hold what its settings hold too
_SHOWN, _SHORT = 3, 20  # settings beside a run's name, and the characters of a value
_NAMES = {**WORDS, "reduction": "waiting for reduced gradients, and so for slower ranks"}


@dataclass(frozen=True)
class Slowest:
    """The rank that others wait for."""

    rank: int
    host: str  # its host's name, "" if it was not recorded
    own_s: float  # seconds of a step without waiting, the mean over steps: a slow phase counts by the others' wait
    median_own_s: float  # the same of the median rank, the lower one of two
    above_median: float  # own_s / median_own_s - 1
    cause: str  # "data", "compute" or "other": where it loses most against the median rank


@dataclass(frozen=True)
class Summary:
    """A run in numbers. None is what the files do not contain."""

    name: str
    ranks: int | None
    hosts: int | None
    starts: int  # how often the run began
    seconds: float | None  # from the first step in the files to the end, without what lies between starts
    epochs: int
    global_step: int
    metrics: dict[str, float]  # of the last epoch; of the last interval, where no epoch has ended
    settled: bool  # times are of more than the first step, which also compiles and connects
    measured_s: float  # how long the steps took that times are of
    samples_per_s: float | None  # over all ranks; median of intervals, of epochs where there is only the first interval
    step_s: float | None  # seconds of a step, the mean over ranks; median of intervals
    parts_s: dict[str, float]  # the same of "compute", "data", "reduction" and "other"
    slowest: Slowest | None
    exchanges: str = ""  # the strategy by which ranks exchange weights every so many steps; then no number is a median
    memory: Parts = field(default_factory=Parts)  # of rank 0 in a step, at most
    allreduce_floor_s: float | None = None  # what reducing the gradients takes at least, where a measurement was given


def summarize(run: RecordedRun) -> Summary:
    """Return a run's numbers; a start's first interval, whose step compiles and connects, counts only in need."""
    intervals, settled = run.intervals, settled_intervals(run.intervals)
    times = {part: intervals.rank_s[part][settled] for part in RECORDED}
    is_settled = bool(not_first(intervals).any())
    hosts = run.environment.get("hosts")
    known = [str(host) for host in hosts] if isinstance(hosts, list) else []
    ends = [each.step[-1] for each in (intervals, run.epochs) if len(each.step)]
    steps, exchanges = np.diff(intervals.step, prepend=0.0)[settled], _exchanges(run.config)
    # Most intervals may be without an exchange, and a median of intervals then shows none.
    typical = partial(_mean_of_steps, steps=steps) if exchanges else _median
    parts = {part: typical(mean(times[part])) for part in PARTS}
    series = run.epochs if len(run.epochs.step) else intervals
    final = [(name, values[-1]) for name, values in series.metrics.items()]
    if intervals.ranks == 1:
        del parts["reduction"]  # nothing is reduced
    return Summary(
        name=run.name,
        ranks=intervals.ranks or len(known) or None,
        hosts=len(set(known)) or None,
        starts=run.starts,
        seconds=run.seconds,
        epochs=len(run.epochs.step),
        global_step=int(max(ends)),
        metrics={name: float(last) for name, last in final if name not in SPEEDS and math.isfinite(last)},
        settled=is_settled,
        measured_s=float(np.nansum(steps * mean(times["step"]))) if is_settled else 0.0,
        samples_per_s=_samples_per_s(run, settled if is_settled and not exchanges else None),
        step_s=typical(mean(times["step"])),
        parts_s={part: value for part, value in parts.items() if value is not None},
        slowest=_slowest(times, known, steps=steps),
        exchanges=exchanges,
        memory=Parts(**run.memory),
    )


def settled_intervals(intervals: Intervals) -> NDArray[np.bool_]:
    """Return which intervals are not a start's first; all, where there are no others."""
    settled = not_first(intervals)
    return settled if settled.any() else np.ones(len(settled), np.bool_)


def not_first(intervals: Intervals) -> NDArray[np.bool_]:
    """Return which intervals are not a start's first, whose step also compiles and connects."""
    found: NDArray[np.bool_] = np.diff(intervals.start, prepend=-1) == 0
    return found


def own_time(times: dict[str, Floats]) -> Floats:
    """Return each rank's own seconds of a step, shape (n, ranks), without waiting for other ranks."""
    return times["data"] + times["compute"] + times["other"]


def relative_own_time(times: dict[str, Floats]) -> Floats:
    """Return each rank's own time over the median rank's in that interval; shape (n, ranks)."""
    own = own_time(times)
    count = np.isfinite(own).sum(axis=1)
    # NaN sorts last. The lower one of two: of two ranks, the faster is the measure.
    middle = np.take_along_axis(np.sort(own, axis=1), np.maximum(count - 1, 0)[:, np.newaxis] // 2, axis=1)
    ratio: Floats = own / np.where(middle == 0, np.nan, middle)
    return ratio


def thin(values: Floats, most: int) -> Floats:
    """Return at most `most` rows, each the mean of as many neighbours; shape (<= most, ...)."""
    stride = -(-len(values) // most)
    if stride <= 1:
        return values
    padded = np.full((-(-len(values) // stride) * stride, *values.shape[1:]), np.nan)
    padded[: len(values)] = values
    return mean(padded.reshape(-1, stride, *values.shape[1:]), axis=1)


def flat(value: Any, name: str = "") -> dict[str, str]:
    """Return what a JSON object holds as text, nested names joined by dots; equal neighbours are counted."""
    if isinstance(value, dict):
        return {
            key: text
            for each, v in value.items()
            for key, text in flat(v, f"{name}.{each}" if name else str(each)).items()
        }
    if isinstance(value, list):
        many = Counter(map(str, value))
        if len(many) < len(value):
            return {name: ", ".join(f"{each} x {count}" if count > 1 else each for each, count in many.items())}
        return {name: " ".join(map(str, value)) if name == "command" else ", ".join(map(str, value))}
    return {name: "none" if value is None else str(value)}


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (name, a's, b's) of all that is not equal; "" is what one of them lacks."""
    first, second = flat(a), flat(b)
    names = dict.fromkeys([*first, *second])
    return [(n, first.get(n, ""), second.get(n, "")) for n in names if first.get(n) != second.get(n)]


def chosen(runs: Sequence[RecordedRun]) -> list[dict[str, str]]:
    """Return of each run the settings that differ among them, and the number of ranks, by their shortest names."""
    found = [flat({**run.config, "ranks": run.environment.get("ranks")}) for run in runs]
    names = dict.fromkeys(name for each in found for name in each)
    differ = [name for name in names if len({each.get(name, "") for each in found}) > 1]
    own = {_end(name) for name in differ if not name.startswith(_REPEATED)}
    columns = [
        name
        for name in differ
        # The first samples are no choice, nor are settings that another optimizer does not have. Of a script's argument
        # and a setting of the same name, such as --lr, the setting is what was used.
        if not name.startswith("data.first")
        and (not name.startswith("optimizer_settings.") or all(name in each for each in found))
        and not (name.startswith(_REPEATED) and _end(name) in own)
    ]
    ends = Counter(map(_end, columns))
    return [{_end(name) if ends[_end(name)] == 1 else name: each.get(name, "") for name in columns} for each in found]


def _end(name: str) -> str:
    return name.rpartition(".")[2].replace("-", "_")


def labels(runs: Sequence[RecordedRun]) -> list[str]:
    """Return each run's name, with the first settings by which it differs from the others."""
    found = []
    for run, settings in zip(runs, chosen(runs), strict=True):
        shown = [f"{name} {value or 'none'}" for name, value in settings.items() if len(value) <= _SHORT]
        found.append(", ".join([run.name, *shown[:_SHOWN]]))
    return found


def ratios(a: Summary, b: Summary) -> list[tuple[str, float, float, str]]:
    """Return (name, a's, b's, unit) of the numbers that both runs have; without speeds if one was too short."""
    rows = [(name, value, b.metrics[name], "") for name, value in a.metrics.items() if name in b.metrics]
    if min(a.measured_s, b.measured_s) < COMPARED_S:
        return rows
    pairs = [("samples/s", a.samples_per_s, b.samples_per_s, ""), ("step", a.step_s, b.step_s, "s")]
    pairs += [(name, value, b.parts_s.get(name), "s") for name, value in a.parts_s.items()]
    return rows + [
        (name, mine, other, unit) for name, mine, other, unit in pairs if mine is not None and other is not None
    ]


def _samples_per_s(run: RecordedRun, settled: NDArray[np.bool_] | None) -> float | None:
    intervals = run.intervals.samples_per_s
    if settled is not None:
        return _median(intervals[settled])
    epochs = run.epochs.metrics.get("samples_per_s", np.empty(0))
    found = _median(epochs[1:] if len(epochs) > 1 else epochs)  # the first has the first step in it
    return _median(intervals) if found is None else found


def _slowest(times: dict[str, Floats], hosts: list[str], *, steps: Floats) -> Slowest | None:
    """Return the rank that costs the others most, by each part's seconds per step; a row is of so many `steps`."""
    own = mean(own_time(times), axis=0, weights=np.maximum(steps, 1.0))
    there = np.flatnonzero(np.isfinite(own))
    if len(there) < 2:
        return None
    rank = int(there[own[there].argmax()])
    middle = lower_median(own[there])
    lost = {}
    for part in WORDS:
        each = np.nan_to_num(mean(times[part], axis=0, weights=np.maximum(steps, 1.0)))
        lost[part] = float(each[rank]) - lower_median(each[there])
    return Slowest(
        rank=rank,
        host=hosts[rank] if rank < len(hosts) else "",
        own_s=float(own[rank]),
        median_own_s=middle,
        above_median=float(own[rank]) / middle - 1,
        cause=max(lost, key=lambda part: lost[part]),
    )


def _median(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


def _mean_of_steps(values: Floats, *, steps: Floats) -> float | None:
    """Return the mean over steps of values by interval."""
    there = np.isfinite(values)
    return float(np.average(values[there], weights=np.maximum(steps[there], 1.0))) if there.any() else None


def _exchanges(config: dict[str, Any]) -> str:
    """Return the strategy of a run in words if it exchanges weights every so many steps."""
    given = config.get("sync")
    sync: dict[str, Any] = given if isinstance(given, dict) else {}
    return f"{sync['strategy']}(every={sync['every']})" if {"strategy", "every"} <= sync.keys() else ""


def mean(values: Floats, *, axis: int = 1, weights: Floats | None = None) -> Floats:
    """Return the mean of the finite values, over ranks by default; unlike np.nanmean, NaN without a warning if none."""
    found: Floats = np.ma.filled(np.ma.average(np.ma.masked_invalid(values), axis=axis, weights=weights), np.nan)
    return found


def sentences(summary: Summary) -> list[str]:
    """Return what there is to say, the most important first."""
    said = [_what(summary)]
    if summary.metrics:
        where = "At the end of the last epoch" if summary.epochs else "So far, within the first epoch"
        said.append(f"{where}: {', '.join(f'{name} {value:.4g}' for name, value in summary.metrics.items())}.")
    if summary.samples_per_s is not None:
        which = "Throughput" if summary.exchanges else "Median throughput"
        said.append(f"{which}: {three_digits(summary.samples_per_s)} samples/s over all ranks.")
    if summary.step_s is not None:
        said.append(_step(summary))
    if summary.slowest is not None and summary.measured_s >= COMPARED_S:
        said.append(_of_slowest(summary.slowest))
    if summary.memory.total:
        said.append(f"Memory of rank 0 in a step, at most: {summary.memory}.")
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
    if min(a.measured_s, b.measured_s) < COMPARED_S:
        times = f"{format_time(a.measured_s)} of A and {format_time(b.measured_s)} of B"
        return (
            f"Their speeds are not compared: without the first steps, {times} were measured, and below "
            f"{COMPARED_S:.0f} s differences are chance."
        )
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
    if summary.exchanges:
        return (
            f"A step takes {format_time(step)} on average, exchanges of weights by {summary.exchanges} included: "
            f"{parts}.{verdict}"
        )
    return f"A typical step takes {format_time(step)}: {parts}.{verdict}"


def _of_slowest(slowest: Slowest) -> str:
    whose = f"rank {slowest.rank}" + (f" on host {slowest.host}" if slowest.host else "")
    mine, median = format_time(slowest.own_s), format_time(slowest.median_own_s)
    times = f"on average {mine} a step by itself, the median rank {median}"
    if slowest.above_median < _EVEN:
        return f"All ranks are about equally fast: the slowest, {whose}, takes {times}."
    others = ", and the others wait for it" if slowest.above_median >= _SLOW else ""
    above = f"{100 * slowest.above_median:.0f} % above the median"
    return f"The slowest is {whose}, {above}{others}: it takes {times}. It loses its time in {_NAMES[slowest.cause]}."


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
