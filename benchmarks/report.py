"""Tables for people, from results as they lie on disk."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import targets
from benchmarks.stats import ratio
from benchmarks.workloads import EVERY
from hvdtrain.telemetry.step_times import Spread

_WIDTH = 160  # columns, where no terminal says
# Against what the tables hold each peer.
_BASES = {"ddp": "/ DDP", "single": "/ one process"}


class ForeignFileError(Exception):
    """A file holds no result of ours; one line names it and says what is wrong with it."""


def load(folder: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return (all results in a folder by the file's name, a line about each file that holds none)."""
    found, foreign = {}, []
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.stem] = read(path)
        except ForeignFileError as error:
            foreign.append(str(error))
    known = [name for name in EVERY if name in found]
    return {name: found[name] for name in [*known, *(name for name in found if name not in known)]}, foreign


def read(path: Path) -> dict[str, Any]:
    """Return the result in a file. Raises ForeignFileError where there is none that can be shown and judged."""
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        show({path.stem: result}, Console(file=io.StringIO()))
        targets.check({path.stem: result})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ForeignFileError(f"{path} holds no result ({type(error).__name__}: {error})") from None
    return result


def save(folder: Path, name: str, result: dict[str, Any]) -> None:
    """Write one result, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{name}.json.part"
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(folder / f"{name}.json")


def console() -> Console:
    """Return a console that is wide enough for the tables where nobody looks at a terminal."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=_WIDTH)


def show(results: dict[str, dict[str, Any]], out: Console) -> None:
    """Print a table for each result."""
    for result in results.values():
        _SHOW[result["kind"]](result, out)


def show_targets(results: dict[str, dict[str, Any]], out: Console) -> bool:
    """Print what was measured for each target; return whether all that was measured is met."""
    table = Table(title=f"Targets, {targets.RANKS} ranks unless said (median, quartiles)")
    for name in ("target", "at most", "measured", "", "note"):
        table.add_column(name, justify="right" if name == "at most" else "left")
    verdicts = targets.check(results)
    words = {True: "met", False: "[bold]NOT MET[/bold]"}
    for each in verdicts:
        if each.measured:
            verdict = words[each.met] if each.sure else f"unsure, {words[each.met]}"
            table.add_row(each.text, f"{each.limit:g}", escape(str(each.measured)), verdict, each.note)
    out.print(table)
    if unsure := [each for each in verdicts if not each.sure]:
        missed = sum(each.met is False for each in unsure)
        out.print(
            f"{len(unsure)} unsure: the quartiles lie on both sides of the limit. The median counts, for --check too: "
            f"by it {len(unsure) - missed} met, {missed} not."
        )
    if missing := sum(each.measured is None for each in verdicts):
        out.print(f"{missing} of {len(verdicts)} targets are not measured in these results.")
    return all(each.met is not False for each in verdicts)


def write(results: dict[str, dict[str, Any]], folder: Path) -> None:
    """Write tables.txt: what was shown, for those who read the results where they are kept."""
    with (folder / "tables.txt").open("w") as stream:
        out = Console(file=stream, width=_WIDTH)
        show(results, out)
        show_targets(results, out)


def _show_steps(result: dict[str, Any], out: Console) -> None:
    machine = result["machine"]
    table = Table(
        title=f"{result['title']}, {result['ranks']} ranks on {_place(machine)}",
        caption=f"{result['commit']}, {result['measured_at']}; times and ratios (turn by turn): median and quartiles",
    )
    bases = [name for name in _BASES if result["peers"].get(name, {}).get("status") == "ok"]
    columns = ("ranks", "ms a step", "mean", *(_BASES[name] for name in bases), "samples/s", "CPU ms", "peak MiB")
    for name in ("peer", *columns):
        table.add_column(name, justify="left" if name == "peer" else "right", no_wrap=name == "peer")
    for name, peer in result["peers"].items():
        if peer["status"] != "ok":
            why = escape(f"{peer['status']}: {peer['why'].splitlines()[0]}")
            table.add_row(peer["title"], str(peer["ranks"]), why)
            continue
        blocks = Spread.of(peer["block_ms"])
        table.add_row(
            peer["title"],
            str(peer["ranks"]),
            escape(f"{blocks.median:.2f} [{blocks.low:.2f}-{blocks.high:.2f}]"),
            f"{peer['mean_ms']:.2f}",
            *(escape(str(ratio(result, name, base))) for base in bases),
            f"{peer['samples_per_s']:,.0f}",
            f"{peer['cpu_ms']:.2f}",
            f"{peer['peak_mib']:.0f}",
        )
    out.print(table)


def _place(machine: dict[str, Any]) -> str:
    gpus = machine.get("gpus")
    return f"{gpus[0]}, driver {machine['driver']}" if gpus else f"{machine['cores']} cores"


def _show_rows(result: dict[str, Any], out: Console) -> None:
    """Print a result that brings its own columns."""
    table = Table(title=result["title"], caption=f"{result['commit']}, {result['measured_at']}")
    for index, name in enumerate(result["columns"]):
        table.add_column(name, justify="right" if index else "left")
    for row in result["rows"]:
        table.add_row(*(f"{cell:,.2f}" if isinstance(cell, float) else str(cell) for cell in row))
    out.print(table)


_SHOW = {"steps": _show_steps, "rows": _show_rows}
