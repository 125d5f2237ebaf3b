"""The page: one HTML file that loads nothing from elsewhere; all text from files is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence

from hvdtrain.system.quantities import format_time, three_digits
from hvdtrain.tools.report.numbers import Summary, comparison, differences, flat, labels, ratios, sentences
from hvdtrain.tools.report.plots import Plot
from hvdtrain.tools.report.reading import RecordedRun

# No network, no script: the browser enforces this, whatever the input files contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# In dark mode, plots are inverted: light becomes dark, and hues stay.
_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1a1a1a; --pale: #505050; --line: #e0e0e0; --box: #f3f6f9;
        --mark: #0072b2; --turned: none; }
@media (prefers-color-scheme: dark) {
  :root { --page: #191919; --text: #e2e2e2; --pale: #adadad; --line: #3a3a3a; --box: #22282e; --mark: #56b4e9;
          --turned: invert(.9) hue-rotate(180deg); }
}
body { margin: 2rem auto; padding: 0 1.5rem; max-width: 76rem; background: var(--page); color: var(--text);
       font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
.sub { color: var(--pale); margin: 0 0 1rem; }
.words { margin: 1rem 0; padding: .8rem 1.2rem .8rem 2.2rem; background: var(--box);
         border-left: 4px solid var(--mark); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1.5rem 2rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 0 2rem;
        align-items: start; }
figure { margin: 0; min-width: 0; } figure.wide { grid-column: 1 / -1; }
figure svg { width: 100%; height: auto; filter: var(--turned); } figure h3 { margin: 0; font-size: 1rem; }
figure.wide div { overflow-x: auto; } figure.wide svg { min-width: 44rem; }
ul.legend { list-style: none; margin: 0; padding: 0; font-size: .85rem; display: flex; flex-wrap: wrap; gap: 0 1rem; }
ul.legend span { display: inline-block; width: 1.2em; height: .7em; margin-right: .4em; filter: var(--turned); }
.note { margin: 0; font-size: .85rem; color: var(--pale); }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); }
tbody th { font-weight: normal; color: var(--pale); } td.number, th.number { text-align: right; white-space: nowrap; }
"""


def page(runs: Sequence[RecordedRun], summaries: Sequence[Summary], plots: Sequence[Plot]) -> str:
    """Return the page of one run, or of two."""
    title = " against ".join(run.name for run in runs)
    body = [f"<h1>{_escape(title)}</h1>", *_about(runs, summaries)]
    if len(runs) == 2:
        said = f"<p>{_escape(comparison(*summaries))}</p>"
        body += ["<h2>In numbers</h2>", said, _ratios(summaries)]
    if plots:
        body += ["<h2>How it went</h2>", '<div class="plots">', *map(_figure, plots), "</div>"]
    body += _tables(runs)
    return "\n".join([
        "<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_escape(title)} - hvdtrain report</title>", f"<style>{_STYLE}</style>", "</head>", "<body>",
        *body, "</body>", "</html>", "",
    ])  # fmt: skip


def _about(runs: Sequence[RecordedRun], summaries: Sequence[Summary]) -> list[str]:
    parts = []
    for index, (run, summary) in enumerate(zip(runs, summaries, strict=True)):
        if len(runs) > 1:
            parts.append(f"<h2>{'AB'[index]}: {_escape(labels(runs)[index])}</h2>")
        began = str(run.environment.get("began") or "").replace("T", " ").replace("+00:00", " UTC")
        parts.append(f'<p class="sub">{_escape(f"began {began}, " if began else "")}in {_escape(str(run.folder))}</p>')
        items = "".join(f"<li>{_escape(each)}</li>" for each in sentences(summary))
        parts.append(f'<ul class="words">{items}</ul>')
        parts += [f'<p class="note">{_escape(note)}</p>' for note in run.notes]
    return parts


def _ratios(summaries: Sequence[Summary]) -> str:
    rows = []
    for name, mine, other, unit in ratios(*summaries):
        shown = [format_time(each) if unit else _plain(each) for each in (mine, other)]
        rows.append((name, *shown, f"{other / mine:.3f}" if mine else ""))
    return _table(rows, ("A", "B", "B / A"), kind=' class="number"')


def _plain(value: float) -> str:
    return three_digits(value) if abs(value) >= 100 else f"{value:.4g}"


def _figure(plot: Plot) -> str:
    # The svg element is ours and holds no text from a file.
    label = f'<svg role="img" aria-label="{_escape(plot.title)}"'
    entries = "".join(
        f'<li><span style="background:{_escape(colour)}"></span>{_escape(text)}</li>' for colour, text in plot.legend
    )
    return "\n".join([
        '<figure class="wide">' if plot.title == "Stragglers" else "<figure>",
        f"<h3>{_escape(plot.title)}</h3>",
        f'<ul class="legend">{entries}</ul>' if entries else "",
        f"<div>{plot.svg.replace('<svg', label, 1)}</div>",
        f'<p class="note">{_escape(plot.note)}</p>' if plot.note else "",
        "</figure>",
    ])  # fmt: skip


def _tables(runs: Sequence[RecordedRun]) -> list[str]:
    parts = ['<div class="pair">']
    for title, name in (("Configuration", "config"), ("Environment", "environment")):
        documents = [getattr(run, name) for run in runs]
        if len(runs) == 1:
            shown = _table([(key, value) for key, value in flat(documents[0]).items() if key])
        else:
            title, shown = f"{title}: what differs", _table(differences(*documents), ("A", "B"))
        parts.append(f"<section><h2>{title}</h2>{shown}</section>")
    return [*parts, "</div>"]


def _table(rows: Sequence[tuple[str, ...]], heads: Sequence[str] = (), *, kind: str = "") -> str:
    if not rows:
        return "<p>Nothing.</p>"
    head = "".join(f"<th{kind}>{each}</th>" for each in heads)
    lines = []
    for name, *values in rows:
        cells = "".join(f"<td{kind}>{_escape(value)}</td>" for value in values)
        lines.append(f'<tr><th scope="row">{_escape(name)}</th>{cells}</tr>')
    head = f"<thead><tr><th></th>{head}</tr></thead>" if heads else ""
    return f"<table>{head}<tbody>{''.join(lines)}</tbody></table>"


def _escape(text: str) -> str:
    # A lone surrogate, which JSON can spell, cannot be written as UTF-8.
    return html.escape(text.encode("utf-8", "replace").decode())
