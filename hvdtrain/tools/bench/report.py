"""The results of `hvdtrain bench`: the step times of all ranks, put together, as JSON and as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdtrain.system.quantities import format_size, format_time, three_digits, time_unit
from hvdtrain.telemetry.memory import WORDS, Parts, Use
from hvdtrain.telemetry.step_times import MARK, MIN_STEPS, WARMUP_STEPS, RankReport, Spread, StepSummary
from hvdtrain.tools.bench.launch import BenchError, LaunchOutcome
from hvdtrain.tools.bench.sweep import Fit, Point, moved_bytes

_QUARTILES_TO_SIGMA = 1.349  # between the quartiles of a normal distribution, in standard deviations


@dataclass(frozen=True)
class RankSteps:
    """The facts about one rank's steps."""

    rank: int
    summary: StepSummary
    facts: Mapping[str, Any]

    @property
    def own_s(self) -> float:
        """The time of a step on this rank by itself: all but the wait for the others."""
        return self.summary.compute_s + self.summary.data_s


@dataclass(frozen=True)
class Steps:
    """The steps of a run, rank by rank."""

    ranks: Sequence[RankSteps]

    @property
    def slowest(self) -> RankSteps:
        """The rank for which the others wait: its own time, without waiting, is the longest."""
        # All steps take equally long, since a reduction waits for the last rank: only its wait is communication alone.
        return max(self.ranks, key=lambda rank: rank.own_s)

    @property
    def fastest(self) -> RankSteps:
        """The rank that takes least by itself."""
        return min(self.ranks, key=lambda rank: rank.own_s)

    def plan_input(self, fit: Fit | None) -> dict[str, Any]:
        """Return what `hvdtrain plan --measured` reads, of the slowest rank; what was not measured is left out."""
        summary, facts, size = self.slowest.summary, self.slowest.facts, len(self.ranks)
        own_s, spread_s = self.slowest.own_s, (summary.own_s.high - summary.own_s.low) / _QUARTILES_TO_SIGMA
        found: dict[str, Any] = {"step_s": own_s, "spread_s": spread_s, "ranks": size}
        found |= {key: facts[key] for key in ("gradient_bytes", "samples_per_step", "framework") if key in facts}
        # In bytes, as `plan --memory` reads them; activations are None where they are not known.
        found |= {name: size for name, size in facts.get("memory", {}).items() if size is not None}
        if summary.backward_s is not None and own_s > 0:
            found["backward_share"] = summary.backward_s / own_s
        # On several hosts, the sweep says nothing of a host's own speed.
        if fit is not None and len({each.facts.get("host") for each in self.ranks}) == 1:
            found["overhead_s"] = fit.alpha_s
            if fit.beta_s_per_byte > 0:
                found["intra_bytes_per_s"] = moved_bytes(1, size) / fit.beta_s_per_byte
        return found


def collect(found: Sequence[RankReport], *, name: str, ranks: int) -> Steps:
    """Return every rank's steps; BenchError, which names the script, if a rank is missing or took too few."""
    found = sorted(found, key=lambda each: each.rank)
    missing = sorted(set(range(ranks)) - {each.rank for each in found})
    fewest = min(found, key=lambda each: each.steps_taken, default=None)
    if fewest is None:
        ways = "hvdtrain.Trainer, hvdtrain.prepare, hvdtrain.torch or hvdtrain.keras"
        why = f"ended without using {ways}, so no step was seen. See README.md, Ways in"
    elif missing:
        why = f"ended without a report of rank {', '.join(map(str, missing))} of {ranks}"
    elif fewest.steps_taken == 0:
        seen = "Seen are steps of the Trainer, of torch optimizers and of Keras's fit and train_on_batch"
        why = f"never took a step on rank {fewest.rank}. {seen}"
    elif fewest.summary is None:
        needed = f"At least {WARMUP_STEPS + MIN_STEPS} are needed: the first {WARMUP_STEPS} warm up and are not counted"
        why = f"took {fewest.steps_taken} steps on rank {fewest.rank}. {needed}"
    else:
        return Steps([RankSteps(each.rank, each.summary, each.facts) for each in found if each.summary is not None])
    raise BenchError(f"{name} {why}")


def from_script(outcome: LaunchOutcome, *, name: str, ranks: int, timeout_s: float) -> Steps:
    """Return the steps that a script's ranks reported; BenchError if it failed, did not end, or took none."""
    found: list[RankReport] = outcome.reports(MARK, RankReport.from_json)
    complete = len(found) == ranks and all(each.summary for each in found)
    if outcome.status is None and not complete:
        raise BenchError(
            f"{name} was ended after {timeout_s:g} s (--timeout), before every rank had reported: {len(found)} of "
            f"{ranks}. Measure fewer --steps, or give it longer; {outcome.last_words()}"
        )
    if outcome.status and not (complete and all(each.facts.get("stopped") for each in found)):
        raise BenchError(f"{name} failed, horovodrun's exit status is {outcome.status}; {outcome.last_words()}")
    return collect(found, name=name, ranks=ranks)


@dataclass(frozen=True)
class Result:
    """All results of a run of bench."""

    title: str  # what was run, for people
    steps: Steps  # of the standard model, or of the script
    advice: dict[str, str]  # {rule: sentence}
    points: Sequence[Point] = ()  # the sweep; empty where there was none
    fit: Fit | None = None  # the line through it
    link_bytes_per_s: float | None = None  # as --link says; None without it
    notes: Sequence[str] = field(default_factory=list)  # how the figures were taken, where that matters to the reader


def as_json(result: Result) -> dict[str, Any]:
    """Return the result in SI units; `plan_input` is what `hvdtrain plan --measured` reads."""
    size = len(result.steps.ranks)
    return {
        "title": result.title,
        "ranks": size,
        "link_bytes_per_s": result.link_bytes_per_s,
        "allreduce": [
            {"bytes": each.num_bytes, "bus_bytes_per_s": each.bus_bytes_per_s(size), "floor_share": each.floor_share}
            | {name: value for name, value in dataclasses.asdict(each).items() if name != "num_bytes"}
            for each in result.points
        ],
        "fit": result.fit
        and {**dataclasses.asdict(result.fit), "how": "least squares of relative errors, t = alpha + bytes * beta"},
        "steps": [
            {"rank": each.rank, **dataclasses.asdict(each.summary), "facts": dict(each.facts)}
            for each in result.steps.ranks
        ],
        "slowest_rank": result.steps.slowest.rank,
        "plan_input": result.steps.plan_input(result.fit),
        "advice": result.advice,
        "notes": list(result.notes),
    }


def show(result: Result, console: Console) -> None:
    """Print tables, then advice."""
    console.print(f"[bold]{escape(result.title)}[/bold]")
    if result.points:
        _show_sweep(result, console)
    _show_steps(result, console)
    _show_memory(result, console)
    for note in result.notes:
        console.print(escape(note))
    if result.advice:
        console.print("\n[bold]Advice[/bold]")
        for said in result.advice.values():
            console.print(f"- {escape(said)}")
    else:
        console.print("\nNothing to advise.")


def _show_sweep(result: Result, console: Console) -> None:
    size = len(result.steps.ranks)
    table = _table("allreduce, float32, averaged", "size", "floor", "median", "quartiles", "bus GB/s", "floor/median")
    for point in result.points:
        floor, share = point.floor_s, point.floor_share
        table.add_row(
            size_of(point.num_bytes),
            "-" if floor is None else format_time(floor) if floor >= 1e-6 else "< 1 us",
            format_time(point.time_s.median),
            quartiles_of(point.time_s),
            f"{point.bus_bytes_per_s(size) / 1e9:.3f}",
            "-" if share is None else f"{share:.1%}",
        )
    console.print(table)


def _show_steps(result: Result, console: Console) -> None:
    parts = ("compute", "reduction wait", "data wait")
    table = _table("a step, from the end of one to the end of the next", "rank", "median", "quartiles", *parts)
    for each in result.steps.ranks:
        summary, whole = each.summary, each.summary.step_s.median
        shares = (summary.compute_s, summary.communication_s, summary.data_s)
        table.add_row(
            str(each.rank),
            format_time(whole),
            quartiles_of(summary.step_s),
            *(f"{format_time(part)} {part / whole:4.0%}" for part in shares),
        )
    console.print(table)
    slowest, fastest = result.steps.slowest, result.steps.fastest
    if len(result.steps.ranks) > 1:
        console.print(
            f"Slowest: rank {slowest.rank}, {format_time(slowest.own_s)} a step without the wait; the fastest takes "
            f"{format_time(fastest.own_s)}. The wait of the others includes that for it."
        )
    console.print(
        f"{slowest.summary.steps} steps, after {WARMUP_STEPS} of warm-up. Reduction wait is exposed communication: "
        "nothing hides it. Parts are in the proportions of the middle half of the steps, and add up to the median."
    )
    if (exchanges := slowest.summary.exchanges) is not None:
        console.print(
            f"Ranks exchanged weights {exchanges} times: a step is the mean from one exchange to the next."
            if exchanges
            else "Ranks exchanged no weights in these steps. Measure more --steps to see what an exchange takes."
        )


def _show_memory(result: Result, console: Console) -> None:
    held = {each.rank: Parts(**each.facts["memory"]) for each in result.steps.ranks if "memory" in each.facts}
    if not held:
        return
    table = _table("memory in a step, at most", "rank", *WORDS.values(), "total")
    for rank, parts in held.items():
        sizes = [getattr(parts, name) for name in WORDS]
        table.add_row(str(rank), *("?" if each is None else format_size(each) for each in (*sizes, parts.total)))
    console.print(table)
    largest = max(held.values(), key=lambda parts: parts.total)
    facts = result.steps.slowest.facts
    framework = "torch" if facts.get("framework") == "torch" else "keras"
    advice = Use(framework, len(result.steps.ranks), {}, bool(facts.get("in_script"))).advice(largest)
    console.print(escape(f"{advice}. With --json, hvdtrain plan --memory --measured FILE says what fits a --limit."))


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def quartiles_of(spread: Spread) -> str:
    """Return the quartiles, in the median's unit."""
    unit, scale = time_unit(spread.median)
    return f"{three_digits(spread.low / scale)} - {three_digits(spread.high / scale)} {unit}"


def size_of(num_bytes: int) -> str:
    """Return a size in the largest binary unit that leaves at least 1."""
    power = min((num_bytes.bit_length() - 1) // 10, 3)
    return f"{num_bytes / (1 << 10 * power):.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
