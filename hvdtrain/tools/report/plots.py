"""Draw runs as inline SVG. No text from a file is drawn: names are in the page's legends, which are escaped."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdtrain.errors import UsageError
from hvdtrain.tools.report.numbers import SPEEDS, labels, mean, not_first, own_time, relative_own_time, thin
from hvdtrain.tools.report.reading import Floats, RecordedRun

try:
    import matplotlib as mpl
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator
except ImportError as missing:
    raise UsageError(
        f"the plots need matplotlib, which does not import ({missing}). Type: pip install matplotlib"
    ) from missing

Runs = Sequence[RecordedRun]
Values = Callable[[RecordedRun], Floats]

# Okabe and Ito's colours, which colour-blind people tell apart, without those too pale for lines on white.
BLUE, RED, GREEN, PURPLE, ORANGE, GREY = "#0072B2", "#D55E00", "#00795A", "#A8467E", "#C98600", "#707070"
RUN_COLOURS = (BLUE, RED)
_PARTS = (("compute", BLUE), ("data", "#E69F00"), ("reduction", "#CC79A7"), ("other", "#009E73"))
_RANK_COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, "#56B4E9", "#000000", GREY)
_UNDER = 3.6  # the first of two runs: where both are equal it is seen on both sides of the other
MOST_POINTS = 400  # a plot is about as many pixels wide
_MOST_ROWS = 128  # of the heat map: more ranks are put together
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "#E4E4E4", "axes.axisbelow": True,
    "text.color": "#1A1A1A", "axes.labelcolor": "#1A1A1A", "xtick.color": "#1A1A1A", "ytick.color": "#1A1A1A",
    "axes.edgecolor": "#808080", "lines.linewidth": 1.6, "figure.constrained_layout.use": True,
    "axes.xmargin": 0.02, "axes.formatter.useoffset": False,
}  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """A figure with its title, legend and note."""

    title: str
    svg: str
    legend: list[tuple[str, str]]  # color and name of each line
    note: str = ""  # how to read it


def draw(runs: Runs, *, floor_s: float | None = None) -> list[Plot]:
    """Return the plots of one run, or of two runs over each other; of times, without each start's first interval."""
    found = [name for run in runs for name in (*run.epochs.metrics, *run.intervals.metrics) if name not in SPEEDS]
    names = dict.fromkeys(name.removeprefix("val_") for name in found)
    with style.context(["default", _STYLE]):
        # A first step that compiles takes a hundred times as long as others: beside it, nothing else would be seen.
        timed = [replace(run, intervals=run.intervals.only(not_first(run.intervals))) for run in runs]
        note = _thinned(timed)
        plots = [
            *(_metric(runs, name) for name in names),
            _curves(
                "Learning rate",
                "",
                runs,
                lambda run: run.rates.metrics["learning_rate"],
                steps=lambda run: run.rates.step,
                dashed=True,
            ),
            _curves(
                "Throughput, all ranks",
                "samples/s",
                timed,
                lambda run: run.intervals.samples_per_s,
                epochs="samples_per_s",
                note=note,
            ),
        ]
        if len(runs) == 1:
            plots += [_own_times(timed[0]), _split(timed[0], floor_s), _heat_map(timed[0])]
        else:
            plots += [_curves("Step time, mean of the ranks", "ms", timed, _step_ms, note=note)]
        return [plot for plot in plots if plot is not None]


def _metric(runs: Runs, name: str) -> Plot | None:
    figure, axis = _axes()
    legend = []
    for index, run in enumerate(runs):
        whose = f" ({_who(runs, index)})" if len(runs) > 1 else ""
        train = RUN_COLOURS[index]
        wide = {"linewidth": _UNDER} if index < len(runs) - 1 else {}
        validation = train if len(runs) > 1 else RED
        if _line(axis, run.intervals.step, run.intervals.metrics.get(name), color=train, alpha=0.4, linewidth=1.1):
            legend.append((f"{train}66", f"train, of the epoch so far{whose}"))
        if _line(axis, run.epochs.step, run.epochs.metrics.get(name), color=train, marker="o", markersize=4, **wide):
            legend.append((train, f"train, epochs (circles){whose}"))
        held_out, steps = run.validations.metrics.get(f"val_{name}"), run.validations.step
        if _line(axis, steps, held_out, color=validation, marker="s", markersize=4, linestyle="--", **wide):
            legend.append((validation, f"validation (dashed, squares){whose}"))
    return _plot(name, figure, legend, _thinned(runs)) if legend else None


def _curves(
    title: str,
    unit: str,
    runs: Runs,
    values: Values,
    *,
    steps: Values = lambda run: run.intervals.step,
    epochs: str = "",
    dashed: bool = False,
    note: str = "",
) -> Plot | None:
    """Draw a line for each run, and circles for its epochs: the entry `epochs` of History."""
    figure, axis = _axes(unit)
    drawn = circles = False
    for index, (run, color) in enumerate(zip(runs, RUN_COLOURS, strict=False)):
        drawn |= _line(axis, steps(run), values(run), color=color, linestyle="--" if dashed and index else "-")
        each = run.epochs.metrics.get(epochs)
        circles |= _line(axis, run.epochs.step, each, color=color, marker="o", markersize=4, linestyle=":")
    _from_zero(axis)
    note = "Circles: epochs as a whole. " * circles + note
    legend = [(RUN_COLOURS[index], _who(runs, index)) for index in range(len(runs)) if len(runs) > 1]
    return _plot(title, figure, legend, note.strip()) if drawn or circles else None


def _step_ms(run: RecordedRun) -> Floats:
    return 1e3 * mean(run.intervals.rank_s["step"])


def _own_times(run: RecordedRun) -> Plot | None:
    figure, axis = _axes("ms")
    step, own = run.intervals.step, 1e3 * own_time(run.intervals.rank_s)
    if not _line(axis, step, _step_ms(run), color=GREY, linestyle=":"):
        return None
    legend = [(GREY, "a whole step, waiting included (dotted)")]
    ranks = own.shape[1]
    if ranks <= len(_RANK_COLOURS):
        for rank in range(ranks):
            _line(axis, step, own[:, rank], color=_RANK_COLOURS[rank])
            legend.append((_RANK_COLOURS[rank], f"rank {rank}"))
    else:
        x, rows = thin(step, MOST_POINTS), np.ma.masked_invalid(thin(own, MOST_POINTS))
        axis.fill_between(x, rows.min(axis=1), rows.max(axis=1), color=BLUE, alpha=0.25, linewidth=0)
        axis.plot(x, np.ma.median(rows, axis=1), color=BLUE)
        worst = int(np.ma.median(np.ma.masked_invalid(own), axis=0).argmax())
        axis.plot(x, rows[:, worst], color=RED)
        legend += [(f"{BLUE}40", f"fastest to slowest of {ranks} ranks"), (BLUE, "the median rank")]
        legend.append((RED, f"rank {worst}, the slowest"))
    _from_zero(axis)
    note = "A rank's own time for a step: data, compute, callbacks. A slow rank makes the others wait for it."
    return _plot("Step time by rank", figure, legend, note)


def _split(run: RecordedRun, floor_s: float | None) -> Plot | None:
    times = {part: 1e3 * thin(mean(rows), MOST_POINTS) for part, rows in run.intervals.rank_s.items()}
    x = thin(run.intervals.step, MOST_POINTS)
    if not np.isfinite(times["step"]).any():
        return None
    known = np.nan_to_num(np.stack([times[part] for part, _ in _PARTS]))
    rest = np.maximum(np.nan_to_num(times["step"]) - known.sum(axis=0), 0)
    rows, parts = np.concatenate([known, rest[np.newaxis]]), (*_PARTS, ("waiting elsewhere", "#C4C4C4"))
    if len(x) == 1:  # an area of one point has no width
        x, rows = np.array([0.0, x[0]]), rows.repeat(2, axis=1)
    figure, axis = _axes("ms")
    axis.stackplot(x, rows, colors=[colour for _, colour in parts], linewidth=0)
    legend = [(colour, name) for name, colour in parts]
    note = "Mean of the ranks. Reduction: waiting for reduced gradients, and so for slower ranks too."
    note += " Other: what lies between steps, as callbacks do."
    if floor_s is not None:
        axis.axhline(1e3 * floor_s, color="#000000", linestyle="--", linewidth=1.2)
        legend.append(("#000000", "allreduce floor (dashed)"))
        note += " The floor: reducing the gradients takes at least this; backward may hide it, so that less is waited."
    elif run.intervals.ranks > 1:
        note += " For the allreduce floor, what reducing takes at least: hvdtrain report --measured."
    _from_zero(axis)
    return _plot("Where a step's time goes", figure, legend, note)


def _heat_map(run: RecordedRun) -> Plot | None:
    if run.intervals.ranks < 2:
        return None
    ratio = 100 * (relative_own_time(run.intervals.rank_s) - 1)
    x, cells = thin(run.intervals.step, MOST_POINTS), thin(ratio, MOST_POINTS)
    if not np.isfinite(cells).any():
        return None
    ranks = cells.shape[1]
    height = -(-ranks // _MOST_ROWS)
    # The slowest of neighbours that are there: a mean would hide a straggler.
    cells = np.fmax.reduceat(cells, np.arange(0, ranks, height), axis=1)
    figure, axis = _axes(size=(12.4, float(np.clip(1.2 + 0.22 * cells.shape[1], 2.0, 5.0))))
    # Twice the median's time is as red as it gets: one long hiccup would pale all that lasts.
    most = float(np.clip(np.percentile(np.abs(cells[np.isfinite(cells)]), 99.5), 20.0, 100.0))
    beyond = " or more" if float(np.nanmax(cells)) > most else ""
    # A cell ends at its step; the first one begins where one as long as the second would, at the run's begin at most.
    left = np.concatenate([[max(0.0, x[0] - (x[1] - x[0] if len(x) > 1 else 1))], x])
    rows = np.minimum(np.arange(cells.shape[1] + 1) * height, ranks) - 0.5
    shown, norm = np.ma.masked_invalid(cells.T), Normalize(-most, most)
    mesh = axis.pcolormesh(left, rows, shown, cmap="RdBu_r", norm=norm, rasterized=True)
    axis.grid(visible=False)
    axis.set_xlim(0, left[-1])
    axis.set_ylabel("rank")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=min(9, ranks)))
    axis.set_ylim(ranks - 0.5, -0.5)
    bar = figure.colorbar(mesh, ax=axis, pad=0.02, aspect=12)
    bar.set_ticks([-most, 0, most], labels=[f"-{most:.0f} %", "0 %", f"+{most:.0f} %{beyond}"])
    bar.outline.set_visible(False)
    note = "A rank's own time for a step, against the median rank's of that time: red is slow, blue is fast."
    if height > 1:
        note += f" A row is the slowest of {height} ranks."
    return _plot("Stragglers", figure, [], note)


def _axes(unit: str = "", *, size: tuple[float, float] = (6.0, 3.0)) -> tuple[Figure, Any]:
    figure = Figure(figsize=size)
    FigureCanvasSVG(figure)
    axis = figure.add_subplot()
    axis.set_xlabel("step")
    axis.set_ylabel(unit)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if unit:
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    return figure, axis


def _from_zero(axis: Any) -> None:
    axis.set_ylim(0, 1.05 * max(axis.get_ylim()[1], 1e-12))


def _line(axis: Any, x: Floats, y: Floats | None, **options: Any) -> bool:
    """Draw a thinned line; return whether there was one. Where values are missing it has a gap."""
    if y is None or not np.isfinite(y).any():
        return False
    x, y = thin(x, MOST_POINTS), thin(y, MOST_POINTS)
    axis.set_xlim(0, max(axis.get_xlim()[1] if axis.lines else 0, 1.02 * float(x[-1]), 1))
    if np.isfinite(y).sum() == 1 and "marker" not in options:
        options["marker"] = "o"
    axis.plot(x, y, **options)
    return True


def _who(runs: Runs, index: int) -> str:
    return f"{'AB'[index]}: {labels(runs)[index]}"


def _thinned(runs: Runs) -> str:
    most = max(-(-len(run.intervals.step) // MOST_POINTS) for run in runs)
    return f"A point is the mean of {most:,} intervals." if most > 1 else ""


def _plot(title: str, figure: Figure, legend: list[tuple[str, str]], note: str) -> Plot:
    """Return the figure as SVG to embed in HTML: without prolog and metadata, with unique ids."""
    buffer = io.StringIO()
    # The salt makes ids of clip paths unique per plot, and equal each time.
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context({"svg.hashsalt": ascii(title)}):
        figure.savefig(buffer, format="svg", dpi=120, transparent=True, metadata=metadata)
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'^<svg([^>]*?) width="[^"]*"', r"<svg\1", re.sub(r'^(<svg[^>]*?) height="[^"]*"', r"\1", svg))
    return Plot(title, svg.strip(), legend, note)
