"""One picture of all step times: a panel a workload, a bar a peer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # there may be no display
import matplotlib.pyplot as plt

from hvdtrain.telemetry.step_times import Spread

_COLOURS = {"trainer": "#0b6e4f", "hvdtrain": "#3aa17e", "ddp": "#c8553d"}
_COLUMNS = 2


def draw(results: dict[str, dict[str, Any]], folder: Path) -> Path | None:
    """Write steps.png into `folder` and return its path; None where there are no step times."""
    panels = [result for result in results.values() if result["kind"] == "steps"]
    if not panels:
        return None
    rows = math.ceil(len(panels) / _COLUMNS)
    figure, axes = plt.subplots(rows, _COLUMNS, figsize=(13, 0.8 + 3.2 * rows), squeeze=False, layout="constrained")
    for axis, result in zip(axes.flat, panels, strict=False):
        _panel(axis, result)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    path = folder / "steps.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _panel(axis: Any, result: dict[str, Any]) -> None:
    """Draw medians with their quartiles; hatched bars train on one process, or on several without exchange."""
    shown = {name: peer for name, peer in result["peers"].items() if peer["status"] == "ok"}
    for row, (name, peer) in enumerate(shown.items()):
        blocks = Spread.of(peer["block_ms"])
        errors = [[blocks.median - blocks.low], [blocks.high - blocks.median]]
        reference = name in ("single", "alone")
        axis.barh(row, blocks.median, xerr=errors, height=0.7, color=_COLOURS.get(name, "#9aa5b1"), ecolor="#333333",
                  hatch="//" if reference else None, edgecolor="white" if reference else None)  # fmt: skip
        label = f" {blocks.median:.3g} ms, {peer['peak_mib']:.0f} MiB"
        axis.text(blocks.high, row, label, va="center", fontsize=8)
    axis.set_yticks(range(len(shown)), [peer["title"] for peer in shown.values()], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, max((max(peer["block_ms"]) for peer in shown.values()), default=1) * 1.25)
    axis.set_title(f"{result['title']}: ms a step, {result['ranks']} ranks", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
