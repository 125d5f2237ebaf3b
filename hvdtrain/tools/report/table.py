"""Compare any number of runs in a table: what each reached of one metric, and what differs between them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.checkpoint.store import sign
from hvdtrain.errors import UsageError
from hvdtrain.system.quantities import format_time
from hvdtrain.tools.report.numbers import SPEEDS, chosen
from hvdtrain.tools.report.reading import Floats, RecordedRun

_MOST_SETTINGS = 6  # columns


@dataclass(frozen=True)
class Row:
    """A run in the table. NaN stands for a metric that the run has not reached."""

    name: str
    best: float
    best_step: int | None  # the global step after which it was measured
    last: float
    steps: int
    seconds: float | None
    settings: dict[str, str]  # those that differ between the runs

    def cells(self) -> list[str]:
        """Return what the table shows, without the settings."""
        at = "" if self.best_step is None else f"{self.best_step:,}"
        took = format_time(self.seconds) if self.seconds else ""
        return [self.name, _value(self.best), at, _value(self.last), f"{self.steps:,}", took]


@dataclass(frozen=True)
class Table:
    """Runs by a metric, the best first."""

    metric: str
    less_is_better: bool
    rows: Sequence[Row]

    def cells(self) -> list[list[str]]:
        """Return the heads, and the cells of each run."""
        names = [*self.rows[0].settings] if self.rows else []
        heads = ["run", "best", "at step", "last", "steps", "time", *names[:_MOST_SETTINGS]]
        return [heads, *([*row.cells(), *(row.settings[name] for name in names[:_MOST_SETTINGS])] for row in self.rows)]

    def hidden(self) -> list[str]:
        """Return the names of settings that differ and have no column."""
        return [*self.rows[0].settings][_MOST_SETTINGS:] if self.rows else []


def tabulate(runs: Sequence[RecordedRun], metric: str | None = None) -> Table:
    """Return the runs by `metric`, by default val_loss, another val_ metric or loss; UsageError if no run has it."""
    known = dict.fromkeys(name for run in runs for name in run.validations.metrics if name not in SPEEDS)
    if metric is None:
        metric = next((name for name in ("val_loss", *known) if name in known and name.startswith("val_")), "loss")
    elif metric not in known:
        raise UsageError(f"no run has the metric {metric}. There are: {', '.join(known) or 'none yet'}")
    better = sign(metric, "auto")
    settings = chosen(runs)
    rows = [_row(run, metric, better, each) for run, each in zip(runs, settings, strict=True)]
    rows.sort(key=lambda row: -math.inf if math.isnan(row.best) else better * row.best, reverse=True)
    return Table(metric, better < 0, rows)


def _row(run: RecordedRun, metric: str, better: float, settings: dict[str, str]) -> Row:
    missing = np.full(len(run.validations.step), np.nan)
    values = run.validations.metrics.get(metric, missing)
    there = np.flatnonzero(np.isfinite(values))
    best = int(there[np.argmax(better * values[there])]) if len(there) else None
    ends = [each.step[-1] for each in (run.intervals, run.epochs) if len(each.step)]
    return Row(
        name=run.name,
        best=math.nan if best is None else float(values[best]),
        best_step=None if best is None else int(run.validations.step[best]),
        last=_last(run.epochs.metrics.get(metric), values),
        steps=int(max(ends, default=0)),
        seconds=run.seconds,
        settings=settings,
    )


def _last(epochs: Floats | None, values: Floats) -> float:
    """Return the last epoch's value, also where it is NaN; of a metric within epochs alone the last finite one."""
    if epochs is not None and len(epochs):
        return float(epochs[-1])
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else math.nan


def _value(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def show(table: Table) -> None:
    """Print the table: for a terminal with lines, else as Markdown."""
    heads, *rows = table.cells()
    count = f"{len(rows)} run{'s' * (len(rows) != 1)}"
    print(f"{count} by {table.metric}, the {'lowest' if table.less_is_better else 'highest'} first:\n")
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table as Drawn
        from rich.text import Text

        drawn = Drawn()
        for place, head in enumerate(heads):
            drawn.add_column(Text(head), justify="right" if 0 < place < 6 else "left", no_wrap=not place)
        for row in rows:
            drawn.add_row(*map(Text, row))
        Console(highlight=False).print(drawn)
    else:
        lines = [heads, ["---:" if 0 < place < 6 else "---" for place in range(len(heads))], *rows]
        for line in lines:
            print("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |")
    if hidden := table.hidden():
        print(f"\nThese settings differ too: {', '.join(hidden)}")
