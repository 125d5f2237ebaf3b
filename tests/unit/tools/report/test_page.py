"""The page: whole HTML that asks for nothing from elsewhere, whatever the files hold."""

from __future__ import annotations

import html.parser
import re
import warnings

import numpy as np
import pytest

from hvdtrain.callbacks import RunFolder
from hvdtrain.tools.report.numbers import summarize
from hvdtrain.tools.report.page import page
from hvdtrain.tools.report.plots import draw
from hvdtrain.tools.report.reading import read_run

VOID = {"meta", "br", "hr", "img", "input", "link"}
EVIL = """<script>alert(1)</script>"'&$x$ \ud800"""


class Reader(html.parser.HTMLParser):
    """Reads a page strictly: every tag is closed in order, every id is there once."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.text, self.problems = [], [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []
        assert self.problems == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
                self.links.append(value)
            if name.startswith("on"):
                self.problems.append(f"{tag} {name}")
            self.links += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}>")

    def handle_data(self, data):
        self.text.append(data)


def check(text):
    """Return what the page says, after seeing that it is well-formed and closed in itself."""
    reader = Reader(text)
    assert not {"script", "iframe", "object", "embed", "link", "base", "form"} & set(reader.tags)
    assert len(set(reader.ids)) == len(reader.ids)
    for link in reader.links:
        assert link.startswith("data:image/png;base64,") or (link[0] == "#" and link[1:] in reader.ids), link
    assert set(re.findall(r"https?://[^\s\"<]*", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "@import" not in text
    assert "default-src 'none'" in text
    text.encode()
    return reader


def shown(*folders, **options):
    runs = [read_run(folder) for folder in folders]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plots = draw(runs, **options)
    return check(page(runs, [summarize(run) for run in runs], plots)), plots


def titles(plots):
    return [plot.title for plot in plots]


def test_a_real_run_is_shown_whole(make, tmp_path, monkeypatch):
    monkeypatch.setattr("hvdtrain.telemetry.interval._MOST_STEPS", 1)  # an interval a step
    x, y = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32), np.arange(12) % 3
    kept = RunFolder(tmp_path / "real", every_s=0)
    make(metrics=["accuracy"]).fit(
        (x, y), validation=(x, y), epochs=2, batch_size=4, callbacks=[kept], progress=False
    )  # fmt: skip
    reader, plots = shown(tmp_path / "real")
    assert titles(plots) == [
        "loss", "accuracy", "Learning rate", "Throughput, all ranks", "Step time by rank", "Where a step's time goes"
    ]  # fmt: skip
    text = "".join(reader.text)
    assert "1 rank on 1 host; 2 epochs ended, 6 steps in " in text
    assert "val_accuracy" in text
    assert "data.number of samples" in text
    assert "packages.torch" in text
    assert [name for _, name in plots[0].legend] == [
        "train, of the epoch so far", "train, epochs (circles)", "validation (dashed, squares)"
    ]  # fmt: skip


def test_what_files_hold_cannot_become_html(made, interval, epoch):
    metrics = {EVIL: 1.0, "_hidden": 2.0, "$broken": 3.0}
    lines = [
        interval(1, metrics=metrics), interval(2, metrics=metrics, data=(1, 2), compute=(3, 4)), epoch(2, **metrics)
    ]  # fmt: skip
    config = {EVIL: EVIL, "list": [EVIL, EVIL], "deep": {EVIL: [{EVIL: 1}]}}
    folders = [
        made(
            lines, name=f"<b onload=x>{name}", config=config, environment={"hosts": [EVIL, EVIL + name], "began": EVIL}
        )
        for name in "ab"
    ]
    for chosen in (folders[:1], folders):
        reader, _ = shown(*chosen)
        assert "b" not in reader.tags
        assert "<script>alert(1)</script>" in "".join(reader.text)


@pytest.mark.parametrize("ranks", [1, 2, 9, 512])
def test_any_number_of_ranks_can_be_shown(made, interval, ranks):
    compute = [0.1 + 0.001 * rank for rank in range(ranks)]
    reader, plots = shown(made([interval(s, data=[0.01] * ranks, compute=compute) for s in (1, 5, 9)]))
    assert ("Stragglers" in titles(plots)) == (ranks > 1)
    assert "image" in reader.tags or ranks == 1
    legend = [name for plot in plots if plot.title == "Step time by rank" for _, name in plot.legend]
    assert (f"rank {ranks - 1}" in legend) == (ranks <= 8)
    assert (f"rank {ranks - 1}, the slowest" in legend) == (ranks > 8)


def test_a_hundred_thousand_lines_make_a_page_of_usual_size(made, interval):
    run = read_run(made([interval(1)]))
    few = made([interval(s, data=(0.1, 0.2), compute=(0.1, 0.1)) for s in range(1, 20_001)], name="long")
    runs = [read_run(few)]
    text = page(runs, [summarize(runs[0])], draw(runs))
    check(text)
    assert len(text) < 500_000
    assert "A point is the mean of 50 intervals." in text
    assert len(run.intervals.step) == 1


@pytest.mark.parametrize("kind", ["one interval", "one epoch", "nulls", "no times"])
def test_a_run_that_has_hardly_begun_can_be_shown(made, interval, epoch, kind):
    lines = {
        "one interval": [interval(1, data=(1, 2), compute=(1, 1))],
        "one epoch": [epoch(3, loss=1.0)],
        "nulls": [interval(s, metrics={"loss": None}, samples_per_s=None, learning_rate=None) for s in (1, 2)],
        "no times": [interval(s, rank_s=None) for s in (1, 2)],
    }[kind]
    reader, plots = shown(made(lines, config={}, environment={}))
    assert "h1" in reader.tags
    assert ("loss" in titles(plots)) == (kind != "nulls")


def test_two_runs_are_over_each_other_with_what_differs(made, interval, epoch):
    a = made(
        [interval(s, rate=100.0, compute=(1.0,)) for s in (1, 2, 30)] + [epoch(30, loss=2.0)],
        name="a",
        config={"seed": 0, "same": 1},
    )
    b = made(
        [interval(s, rate=125.0, compute=(1.0,)) for s in (1, 2, 30)] + [epoch(30, loss=1.0)],
        name="b",
        config={"seed": 7, "same": 1},
    )
    reader, plots = shown(a, b)
    text = [each.strip() for each in reader.text if each.strip()]
    at = text.index("samples/s")
    assert text[at : at + 4] == ["samples/s", "100", "125", "1.250"]
    at = text.index("Configuration: what differs")
    assert text[at : at + 7] == ["Configuration: what differs", "A", "B", "seed", "0", "7", "Environment: what differs"]
    assert "same" not in text
    assert text[-1] == "Nothing."
    assert plots[0].legend[0][0] != plots[0].legend[2][0]
    assert [name for _, name in plots[0].legend if "circles" in name] == [
        "train, epochs (circles) (A: a, seed 0)", "train, epochs (circles) (B: b, seed 7)"
    ]  # fmt: skip


def test_a_first_step_that_compiles_does_not_flatten_the_plots_of_times(made, interval):
    slow_start = [interval(1, data=(9, 9), compute=(9, 9)), *(interval(s, data=(1, 1), compute=(2, 2)) for s in (5, 9))]
    even = [interval(1, data=(1, 1), compute=(2, 2)), *(interval(s, data=(1, 1), compute=(2, 2)) for s in (5, 9))]
    timed = [
        {plot.title: plot.svg for plot in shown(made(lines, name=name))[1]}
        for lines, name in ((slow_start, "slow"), (even, "even"))
    ]
    for title in ("Step time by rank", "Where a step's time goes", "Stragglers"):
        assert timed[0][title] == timed[1][title]


def test_the_axis_of_stragglers_begins_at_step_0(made, interval):
    lines = [interval(s, data=(1, 1), compute=(1, 2)) for s in (1, 15, 95)]
    svg = next(plot.svg for plot in shown(made(lines))[1] if plot.title == "Stragglers")
    assert ">0</text>" in svg
    assert not re.findall(r">-[\d,]+</text>", svg)


def test_one_hiccup_does_not_pale_a_rank_that_is_twice_as_slow(made, interval):
    twice = [interval(step, data=(1, 1), compute=(1, 3)) for step in range(1, 300)]
    maps = []
    for name, hiccup in (("hiccup", 999), ("steady", 4)):
        last = [interval(step, data=(1, 1), compute=(1, hiccup)) for step in (300, 301, 302)]
        maps.append(next(plot.svg for plot in shown(made([*twice, *last], name=name))[1] if plot.title == "Stragglers"))
    assert "+100 % or more" in maps[0]
    assert maps[0] == maps[1]


def test_a_start_over_is_said_and_so_is_what_could_not_be_read(made, interval):
    reader, _ = shown(made([interval(1), interval(9), interval(4)], tail='{"half'))
    text = "".join(reader.text)
    assert "4 steps, in 2 starts." in text  # of which the lines that count, one each, tell no time
    assert "1 line of metrics.jsonl could not be read" in text


def test_the_floor_is_drawn_only_where_it_is_known(made, interval):
    folder = made([interval(s, data=(0.1, 0.1), compute=(0.1, 0.2)) for s in (1, 2)])
    for floor_s in (None, 0.01):
        _, plots = shown(folder, floor_s=floor_s)
        names = [name for plot in plots if plot.title == "Where a step's time goes" for _, name in plot.legend]
        assert len(names) == 5 + (floor_s is not None)
        assert ("allreduce floor (dashed)" in names) == (floor_s is not None)
