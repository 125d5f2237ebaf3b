"""What `hvdtrain bench` found, as JSON and as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdtrain.telemetry.step_times import WARMUP_STEPS, Spread
from hvdtrain.tools.bench.steps import Steps
from hvdtrain.tools.bench.sweep import Fit, Point
from hvdtrain.tools.quantities import format_time, three_digits, time_unit


@dataclass(frozen=True)
class Result:
    """Everything that was found."""

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
