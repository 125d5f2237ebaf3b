"""Read a run's folder: what callbacks.RunFolder wrote, whole or torn, once or over several starts."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.callbacks.run_folder import CONFIG, ENVIRONMENT, METRICS
from hvdtrain.errors import UsageError
from hvdtrain.system import redact
from hvdtrain.telemetry.interval import PARTS
from hvdtrain.telemetry.memory import WORDS

RECORDED = ("step", *PARTS)
Floats = NDArray[np.float64]
_MOST_OF_A_STEP = 20  # lines: a learning rate, an interval, an epoch, and a line of each validation set


@dataclass(frozen=True)
class Series:
    """Metrics along a run; what is missing is NaN."""

    step: Floats  # the global step, rising; shape (n,)
    metrics: dict[str, Floats]  # of each name the values, shape (n,)


@dataclass(frozen=True)
class Intervals(Series):
    """Intervals of about a second of training."""

    samples_per_s: Floats
    start: NDArray[np.int64]  # which start of the run it belongs to, from 0
    rank_s: dict[str, Floats]  # seconds per step by part of `RECORDED`, shape (n, ranks); NaN if a rank was not there

    @property
    def ranks(self) -> int:
        """The largest number of ranks there was."""
        return int(self.rank_s["step"].shape[1])

    def only(self, which: NDArray[np.bool_]) -> Intervals:
        """Return those that `which`, shape (n,), marks."""
        arrays = {name: getattr(self, name)[which] for name in ("step", "samples_per_s", "start")}
        metrics, rank_s = ({name: rows[which] for name, rows in each.items()} for each in (self.metrics, self.rank_s))
        return Intervals(metrics=metrics, rank_s=rank_s, **arrays)


@dataclass(frozen=True)
class RecordedRun:
    """The contents of a run's folder."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    intervals: Intervals
    rates: Series  # the learning rate, of intervals and of steps that changed it
    epochs: Series  # one entry per epoch, metrics as History has them
    validations: Series  # also those within epochs
    starts: int  # how often it began, as far as the files show: by steps that were taken again
    seconds: float | None = None  # that its starts took together, None where the files do not say
    memory: dict[str, float] = field(default_factory=dict)  # bytes of rank 0 in a step, by the fields of Parts
    notes: list[str] = field(default_factory=list)  # what could not be read, in words

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name


def read_run(folder: Path) -> RecordedRun:
    """Return what `folder` holds; UsageError, which says what to type instead, if it is no run's."""
    _require_run(folder)
    path = folder / METRICS
    lines, unreadable = _lines(path)
    if not lines:
        empty, other = "is empty: wait for the first step, or name another run", "has no whole line that a run wrote"
        raise UsageError(
            f"{path} {f'{other}. Name the folder of a run: hvdtrain report runs/NAME' if unreadable else empty}"
        )
    counted, starts = last_word(lines)
    notes = []
    if unreadable:
        what = "1 line" if unreadable == 1 else f"{unreadable:,} lines"
        notes.append(f"{what} of {METRICS} could not be read (cut off by a kill, or not a run's) and left out.")
    epochs = [line for _, line in counted if line["kind"] == "epoch"]
    rates = [line for _, line in counted if "learning_rate" in line]
    validated = [line for _, line in counted if line["kind"] in ("epoch", "validation")]
    config, environment = (_document(folder / name, notes) for name in (CONFIG, ENVIRONMENT))
    return RecordedRun(
        folder=folder,
        config=config,
        environment=environment,
        intervals=_intervals([(start, line) for start, line in counted if line["kind"] == "interval"]),
        rates=Series(_column(rates, "global_step"), {"learning_rate": _column(rates, "learning_rate")}),
        epochs=Series(_column(epochs, "global_step"), _metrics(epochs)),
        validations=_together(validated),
        starts=starts,
        seconds=_seconds(counted),
        memory=_memory(epochs[-1:]),
        notes=notes,
    )


def last_word(lines: Iterable[dict[str, Any]]) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """Return the lines that count, each with its start, and how many starts there were."""
    # A run that was killed resumes from a checkpoint: of steps that it repeats, the earlier lines do not count.
    counted: list[tuple[int, dict[str, Any]]] = []
    start = 0
    for line in lines:
        step = line["global_step"]
        # A step has at most a line of each kind, and of each validation set.
        is_known = _kind(line) in (_kind(each) for _, each in counted[-_MOST_OF_A_STEP:])
        if is_known or (counted and step < counted[-1][1]["global_step"]):
            start += 1
            while counted and counted[-1][1]["global_step"] >= step:
                counted.pop()
        counted.append((start, line))
    return counted, start + 1


def _kind(line: dict[str, Any]) -> tuple[Any, ...]:
    """Return a line's step and kind; of a validation set also the names of its metrics."""
    names = line.get("metrics") if line["kind"] == "validation" else None
    return (line["global_step"], line["kind"], *(names if isinstance(names, dict) else ()))


def number(value: Any) -> float:
    """Return a number of JSON; NaN if it is no number, or not finite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else math.nan


def _require_run(folder: Path) -> None:
    if folder.is_file():
        hint = f"its folder: hvdtrain report {folder.parent}" if folder.name == METRICS else "the folder of a run"
        raise UsageError(f"{folder} is a file. Give {hint}")
    if not folder.is_dir():
        names = [each.name for each in _runs(folder.parent)]
        near = difflib.get_close_matches(folder.name, names, n=1, cutoff=0.5) or names
        hint = f"Try: hvdtrain report {folder.parent / near[0]}" if near else "Runs are in runs/, see: ls runs"
        raise UsageError(f"there is no folder {folder}. {hint}")
    if not (folder / METRICS).is_file():
        inside = _runs(folder)
        hint = f"It holds runs; try: hvdtrain report {inside[0]}" if inside else "Name a run: hvdtrain report runs/NAME"
        raise UsageError(f"{folder} has no {METRICS}, so it is no run's folder. {hint}")


def _runs(folder: Path) -> list[Path]:
    """Return the runs in a folder, the newest first."""
    found = [each.parent for each in folder.glob(f"*/{METRICS}")] if folder.is_dir() else []
    return sorted(found, key=lambda run: (run / METRICS).stat().st_mtime, reverse=True)


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines that a run wrote, and how many others there are."""
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = [_line(text) for text in file if text.strip()]
    return [line for line in lines if line is not None], lines.count(None)


def _line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or line.get("kind") not in ("step", "interval", "validation", "epoch"):
        return None
    line["global_step"] = number(line.get("global_step"))
    if math.isnan(line["global_step"]):
        return None
    if line["kind"] == "interval":
        line["rank_s"] = _rank_s(line.get("rank_s"))
    return line


def _seconds(counted: Iterable[tuple[int, dict[str, Any]]]) -> float | None:
    times: dict[int, list[float]] = {}
    for start, line in counted:
        at = number(line.get("time"))
        if math.isfinite(at):
            times.setdefault(start, []).append(at)
    return sum(max(each) - min(each) for each in times.values()) or None


def _memory(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, Any] = next((line["memory"] for line in lines if isinstance(line.get("memory"), dict)), {})
    return {name: size for name in WORDS if math.isfinite(size := number(found.get(name)))}


def _rank_s(value: Any) -> NDArray[np.float32]:
    """Return an array of shape (parts, ranks); no ranks where times are missing or of unequal numbers of ranks."""
    if isinstance(value, dict) and "other" not in value and isinstance(value.get("step"), list):
        value = {**value, "other": [0.0] * len(value["step"])}  # a run of a version without this part
    rows: list[Any] = [value.get(part) for part in RECORDED] if isinstance(value, dict) else []
    if not rows or not all(isinstance(row, list) and len(row) == len(rows[0]) for row in rows):
        return np.empty((len(RECORDED), 0), np.float32)
    return np.array([[number(each) for each in row] for row in rows], np.float32)


def _document(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError) as problem:
        notes.append(f"{path.name} could not be read: {problem}.")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} holds no JSON object.")
        return {}
    shown: dict[str, Any] = redact.document(value)  # an older version may have written secrets
    return shown


def _together(lines: Sequence[dict[str, Any]]) -> Series:
    """Return one entry per step, of the metrics in all its lines."""
    found: dict[float, dict[str, Any]] = {}
    for line in lines:
        found.setdefault(line["global_step"], {}).update(
            line["metrics"] if isinstance(line.get("metrics"), dict) else {}
        )
    return Series(np.array(list(found), np.float64), _metrics([{"metrics": each} for each in found.values()]))


def _column(lines: Sequence[dict[str, Any]], name: str) -> Floats:
    return np.array([number(line.get(name)) for line in lines], np.float64)


def _metrics(lines: Sequence[dict[str, Any]]) -> dict[str, Floats]:
    rows = [line["metrics"] if isinstance(line.get("metrics"), dict) else {} for line in lines]
    names = dict.fromkeys(name for row in rows for name in row)  # in the order in which they come up
    return {name: np.array([number(row.get(name)) for row in rows], np.float64) for name in names}


def _intervals(numbered: Sequence[tuple[int, dict[str, Any]]]) -> Intervals:
    lines = [line for _, line in numbered]
    ranks = max((line["rank_s"].shape[1] for line in lines), default=0)
    times = np.full((len(RECORDED), len(lines), ranks), np.nan)
    for index, line in enumerate(lines):
        times[:, index, : line["rank_s"].shape[1]] = line["rank_s"]
    return Intervals(
        step=_column(lines, "global_step"),
        metrics=_metrics(lines),
        samples_per_s=_column(lines, "samples_per_s"),
        start=np.array([start for start, _ in numbered], np.int64),
        rank_s=dict(zip(RECORDED, times, strict=True)),
    )
