"""The command line of `hvdtrain report`: options only, so that `hvdtrain --help` imports nothing heavy."""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hvdtrain.cli.shared import FILE, NEW_FILE, Debug, check_page, option, quantity
from hvdtrain.errors import UsageError
from hvdtrain.system import private_files
from hvdtrain.system.quantities import parse_rate
from hvdtrain.system.user_paths import expanded
from hvdtrain.tools.plan.model import read_measured

if TYPE_CHECKING:
    from hvdtrain.tools.report.numbers import Summary


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="A run's folder, or several to compare.", **quantity(expanded, "RUN")),
    ] = None,
    out: Annotated[
        Path | None,
        option("The page; default: report.html in RUN, for two runs in this folder.", **NEW_FILE),
    ] = None,
    measured: Annotated[
        Path | None, option("Show the allreduce floor, from a file of: hvdtrain bench --script X --json", **FILE)
    ] = None,
    link: Annotated[
        str | None,
        option("Speed between ranks, for the floor: 25Gb/s of a link, 9GB/s through memory.", metavar="RATE"),
    ] = None,
    metric: Annotated[
        str | None,
        option("Sort the table by it; default: val_loss, else a val_ metric, else loss.", metavar="NAME"),
    ] = None,
    json: Annotated[bool, option("Print the numbers as one JSON object; a page only with --out.", "--json")] = False,
    debug: Debug = False,
) -> None:
    """Make a page of a run or two, or a table of several by a metric.

    The page opens offline, and shows curves, speed, stragglers and settings. The table shows what each run reached, and
    the settings that differ: hvdtrain report runs/* --metric val_accuracy

    Example: hvdtrain report runs/train-20261121-100000
    """
    folders = runs or []
    if metric is not None and len(folders) < 2:
        raise UsageError("--metric is for a table of several runs. Type: hvdtrain report runs/* --metric val_loss")
    if len(folders) > 2:
        if out is not None or measured is not None or link is not None:
            raise UsageError("--out, --measured and --link are for a page, which shows one run or two")
        _table(folders, metric, as_json=json)
        return
    if metric is not None and json:
        raise UsageError("--metric with --json is for three runs or more: the JSON of two has all metrics")
    try:
        path = _report(folders, out=out, measured=measured, link=link, as_json=json)
    except ValueError as error:  # of a file or a rate that cannot be read
        raise UsageError(str(error)) from None
    if not json:
        if len(folders) == 2:
            _table(folders, metric, as_json=False)
        print(f"wrote {path}: open it in a browser")


def _table(folders: list[Path], metric: str | None, *, as_json: bool) -> None:
    """Print a table of the runs; of many, a folder that holds no run is left out, with a line."""
    from dataclasses import asdict

    from hvdtrain.callbacks.run_folder import plain
    from hvdtrain.tools.report.reading import read_run
    from hvdtrain.tools.report.table import show, tabulate

    found, left_out = [], []
    for folder in folders:
        try:
            found.append(read_run(folder))
        except UsageError as problem:
            left_out.append((folder, problem))
    if left_out and (len(folders) <= 2 or not found):
        raise left_out[0][1]
    table = tabulate(found, metric)
    if as_json:
        rows = [asdict(row) for row in table.rows]
        shown = {"metric": table.metric, "best": "lowest" if table.less_is_better else "highest", "runs": rows}
        print(json_format.dumps(plain(shown), indent=2, allow_nan=False))
    else:
        show(table)
    if left_out:
        names = ", ".join(str(folder) for folder, _ in left_out)
        print(f"hvdtrain report: left out, because they hold no run's metrics: {names}", file=sys.stderr)


def _report(folders: list[Path], *, out: Path | None, measured: Path | None, link: str | None, as_json: bool) -> Path:
    """Read the runs, print and write the report; return the path of the page."""
    from dataclasses import asdict, replace

    from hvdtrain.tools.report.numbers import ratios, summarize
    from hvdtrain.tools.report.reading import read_run

    if not folders:
        raise UsageError("name a run, or several to compare. Type: hvdtrain report runs/NAME (to see them: ls runs)")
    if measured is not None and len(folders) == 2:
        raise UsageError("--measured is for one run. Remove it, or name one run")
    if link is not None and measured is None:
        raise UsageError("--link needs --measured, which has the size of the gradients")
    path = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    found = [read_run(folder) for folder in folders]
    if out is not None or not as_json:
        check_page(path)
    summaries = [summarize(run) for run in found]
    if measured is not None:
        summaries = [replace(summaries[0], allreduce_floor_s=_floor(summaries[0], measured, link))]
    if as_json:
        shown = [asdict(summary) for summary in summaries]
        if len(shown) == 2:
            over = {name: b / a for name, a, b, _ in ratios(*summaries) if a}
            shown = [{"a": shown[0], "b": shown[1], "b_over_a": over}]
        print(json_format.dumps(shown[0], indent=2, allow_nan=False))
    if out is not None or not as_json:
        from hvdtrain.tools.report.page import page
        from hvdtrain.tools.report.plots import draw

        drawn = draw(found, floor_s=summaries[0].allreduce_floor_s)
        private_files.write_text(path, page(found, summaries, drawn))
    return path


def _floor(summary: Summary, measured: Path, link: str | None) -> float:
    """Return the allreduce floor of a run from bench's measurements; without guesses if these are not enough."""
    from hvdtrain.tools.bench.sweep import moved_bytes

    known = read_measured(measured)
    if "gradient_bytes" not in known:
        raise UsageError(f"{measured} has no gradient_bytes: write it with hvdtrain bench --script X --json")
    if link is not None:
        speed = parse_rate(link)
    elif summary.hosts == 1 and "intra_bytes_per_s" in known:
        speed = known["intra_bytes_per_s"]
    else:
        here = f", which {measured} lacks. `hvdtrain bench` without --script measures it; then type, say: --link 9GB/s"
        there = ". Give the link's between hosts: --link 25Gb/s"
        raise UsageError(f"the floor needs the speed between ranks{here if summary.hosts == 1 else there}")
    if not speed > 0:
        raise UsageError(f"the speed between ranks must be above zero. Received: {speed} bytes a second")
    return moved_bytes(known["gradient_bytes"], summary.ranks or 1) / speed
