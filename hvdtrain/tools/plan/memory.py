"""The memory of a rank with each option that shrinks it, and the first combination that fits a limit.

Without options each rank holds all weights, gradients and optimizer state, Horovod's buffer, and the activations of its
samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

from rich.console import Console
from rich.table import Table

from hvdtrain.system.quantities import format_size
from hvdtrain.telemetry.memory import OPTIONS, WORDS, Option, Parts
from hvdtrain.tools.plan.model import require

# Horovod 0.28 copies gradients that it sends together into a buffer of this size (HOROVOD_FUSION_THRESHOLD).
BUFFER_BYTES = 128 * 2.0**20


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a rank holds with some options."""

    options: Sequence[Option]
    parts: Parts

    @property
    def name(self) -> str:
        """The options as one writes them."""
        return ", ".join(map(str, self.options)) or "none of these"


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What a rank holds without options, and what is known of the run."""

    parts: Parts
    ranks: int
    limit: float | None = None  # bytes that a rank may take
    batch_size: int | None = None  # samples of a rank's step, with which activations were measured

    def __post_init__(self) -> None:
        require("the size of the weights (bytes)", self.parts.weights, "above 0 and finite")
        for name in ("gradients", "optimizer", "buckets", "activations"):
            require(f"the size of {WORDS[name]} (bytes)", getattr(self.parts, name) or 0, "0 or above, and finite")
        require("the number of ranks", self.ranks, "above 0 and finite")
        require("a rank's samples in a step", 1 if self.batch_size is None else self.batch_size, "above 0 and finite")
        if self.limit is not None:
            require("the limit (bytes)", self.limit, "above 0 and finite")

    def fits(self, row: Row) -> bool:
        """Return whether a row is within the limit; True without one."""
        return self.limit is None or row.parts.total <= self.limit

    def row(self, options: Sequence[Option] = ()) -> Row:
        """Return what a rank holds with these options; a micro-batch is the largest half of a half that fits, or 1."""
        rows = [self._row([_of_samples(each, size, self.batch_size) for each in options]) for size in self._sizes()]
        return next(filter(self.fits, rows), rows[-1])

    def rows(self) -> list[Row]:
        """Return the plain row, one for each option, one for all of them, and the first that fits if it is another."""
        found = [self.row(), *(self.row([each]) for each in self._options())]
        found += [self.row(self._together())] if len(self._together()) > 1 else []
        first = self.first_that_fits()
        return found if first is None or first in found else [*found, first]

    def first_that_fits(self) -> Row | None:
        """Return the row with the fewest options that fits, those that cost least first; None if there is none."""
        return next(filter(self.fits, self._combinations()), None)

    def least(self) -> float:
        """Return the smallest total."""
        return min(row.parts.total for row in self._combinations())

    def _combinations(self) -> Iterator[Row]:
        options = self._options()
        for count in range(len(options) + 1):
            for chosen in combinations(options, count):
                if len({each.name for each in chosen}) == count:  # an option has one value
                    yield self.row(chosen)

    def _together(self) -> list[Option]:
        """Return all options, each with the value that saves most."""
        return list({each.name: each for each in self._options()}.values())

    def _options(self) -> list[Option]:
        """Return those that shrink something here."""
        there = {*self.parts.largest_first()}
        found = [each for each in OPTIONS if there.intersection(each.shrinks)]
        found = [each for each in found if self.ranks > 1 or not each.divides]
        return [each for each in found if each.name != "micro_batch" or (self.batch_size or 0) > 1]

    def _sizes(self) -> list[int]:
        """Return the sizes of micro-batches: a half of the batch, a half of that, and so on."""
        samples = self.batch_size or 1
        return [samples >> power for power in range(1, samples.bit_length())] or [1]

    def _row(self, options: Sequence[Option]) -> Row:
        parts = self.parts
        for each in options:
            parts = each.applied(parts, self.ranks)
        return Row(options=tuple(options), parts=parts)


def _of_samples(option: Option, samples: int, batch_size: int | None) -> Option:
    if option.name != "micro_batch" or not batch_size:
        return option
    return replace(option, value=str(samples), leaves=samples / batch_size)


def as_json(plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan as one JSON object; sizes are in bytes."""
    first = plan.first_that_fits()
    rows = [
        {"options": [*map(str, row.options)], **asdict(row.parts), "total": row.parts.total}
        | {"fits": None if plan.limit is None else plan.fits(row)}
        for row in plan.rows()
    ]
    wanted = None if plan.limit is None or first is None else [*map(str, first.options)]
    return {"ranks": plan.ranks, "limit": plan.limit, "batch_size": plan.batch_size, "memory": rows, "wants": wanted}


def show(plan: MemoryPlan, console: Console) -> None:
    """Print the table, and the first combination that fits."""
    first = plan.first_that_fits() if plan.limit is not None else None
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("Trainer(...)", overflow="fold")
    for heading in ("weights", "gradients", "optimizer\nstate", "buckets", "activations", "total"):
        table.add_column(heading, justify="right", no_wrap=True)
    if plan.limit is not None:
        table.add_column("fits", no_wrap=True)
    for row in plan.rows():
        sizes = ["?" if size is None else format_size(size) for size in asdict(row.parts).values()]
        fits = [] if plan.limit is None else ["yes" if plan.fits(row) else "no"]
        table.add_row(row.name, *sizes, format_size(row.parts.total), *fits, style="bold" if row == first else None)
    console.print(table)
    console.print(f"\n{_meaning(plan)}\n{_verdict(plan, first)}")


def _meaning(plan: MemoryPlan) -> str:
    said = (
        f"At most, on each of {plan.ranks} ranks. Not counted: the framework itself, data, and what an optimizer "
        'computes within its step. micro_batch and shard="gradients" are for PyTorch.'
    )
    if plan.parts.activations is None:
        return f"{said} Activations are not known: give --activations, or measure them with hvdtrain bench --script."
    said += " What options leave of activations differs from model to model: hvdtrain bench --script measures it."
    return said + " --batch-size adds micro_batch." * (plan.batch_size is None)


def _verdict(plan: MemoryPlan, first: Row | None) -> str:
    if plan.limit is None:
        return "--limit says which combination fits."
    limit = format_size(plan.limit)
    counted = "" if plan.parts.activations is not None else " before any activations"
    if first is None:
        least = format_size(plan.least())
        return f"Nothing fits into {limit}{counted}: {least} are left at best. A smaller model would, or more ranks."
    if not first.options:
        return f"It fits into {limit} without any option{counted}."
    return f"The first to fit into {limit}{counted}, those that cost least before others: {first.name}."
