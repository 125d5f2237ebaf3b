"""`hvdtrain report` as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hvdtrain.cli import program


@pytest.fixture
def report(monkeypatch):
    """Return what runs `hvdtrain report` in this process and returns its exit status."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["hvdtrain", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as info:
            program.main()
        return info.value.code

    return call


@pytest.fixture
def run(made, interval, epoch):
    return made([interval(s, data=(0.01, 0.01), compute=(0.1, 0.2)) for s in (1, 2, 3)] + [epoch(3, loss=0.5)])


def test_the_page_is_in_the_runs_folder(report, run, capsys):
    assert report(run) == 0
    assert capsys.readouterr().out == f"wrote {run / 'report.html'}: open it in a browser\n"
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_of_two_runs_it_is_in_this_folder_or_where_out_says(report, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert report(run, run) == 0
    assert report(run, run, "--out", "pair.html") == 0
    assert (tmp_path / "report.html").read_text() == (tmp_path / "pair.html").read_text()
    assert not (run / "report.html").exists()


def test_json_has_the_summarys_numbers_and_writes_nothing(report, run, capsys):
    assert report(run, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["metrics"], found["step_s"]) == (2, {"loss": 0.5}, pytest.approx(0.21))
    assert (found["slowest"]["rank"], found["allreduce_floor_s"]) == (1, None)
    assert not (run / "report.html").exists()


def test_json_of_two_runs_has_ratios(report, run, made, interval, capsys):
    usual, slow = (
        made([interval(s, rate=rate, compute=(0.1,)) for s in (1, 200)], name=name)
        for name, rate in (("usual", 100.0), ("slow", 50.0))
    )
    assert report(usual, slow, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["a"]["name"], found["b"]["name"]) == ("usual", "slow")
    assert found["b_over_a"]["samples/s"] == 0.5


def test_the_floor_is_what_the_measured_bytes_take_at_least(report, made, interval, tmp_path, capsys):
    run = made([interval(1, data=(0.1, 0.1), compute=(0.1, 0.1))], name="near", environment={"hosts": ["a", "a"]})
    far = made([interval(1, data=(0.1, 0.1), compute=(0.1, 0.1))], name="far", environment={"hosts": ["a", "b"]})
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"plan_input": {"gradient_bytes": 1e8, "intra_bytes_per_s": 5e9}}))
    assert report(run, "--json", "--measured", bench) == 0
    assert json.loads(capsys.readouterr().out)["allreduce_floor_s"] == pytest.approx(0.02)
    assert report(far, "--json", "--measured", bench, "--link", "10Gb/s") == 0
    assert json.loads(capsys.readouterr().out)["allreduce_floor_s"] == pytest.approx(0.08)
    assert report(far, "--json", "--measured", bench) == 2
    assert "Give the link's between hosts: --link 25Gb/s" in capsys.readouterr().err
    bench.write_text(json.dumps({"plan_input": {"gradient_bytes": 1e8}}))  # of bench --script on one host
    assert report(run, "--json", "--measured", bench) == 2
    assert "`hvdtrain bench` without --script measures it; then type, say: --link 9GB/s" in capsys.readouterr().err
    assert report(run, "--json", "--measured", bench, "--link", "10GB/s") == 0
    assert json.loads(capsys.readouterr().out)["allreduce_floor_s"] == pytest.approx(0.01)


@pytest.fixture
def three(made, epoch):
    """Return three runs, and a file beside them."""
    losses = {0.1: (0.9, 0.2, 0.4), 0.01: (0.9, 0.8, 0.7), 1.0: (0.9, None, None)}
    folders = [
        made(
            [epoch(10 * (n + 1), n, val_loss=loss, val_f1=n) for n, loss in enumerate(values)],
            name=f"at {lr}",
            config={"optimizer_settings": {"lr": lr}, "arguments": {"lr": str(lr)}, "seed": 0},
        )
        for lr, values in losses.items()
    ]
    (folders[0].parent / "log.csv").write_text("")
    return sorted(folders[0].parent.iterdir())


def test_several_runs_are_a_table_by_a_metric_with_what_differs(report, three, capsys):
    assert report(*three) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "3 runs by val_loss, the lowest first:",
        "",
        "| run | best | at step | last | steps | time | lr |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
        "| at 0.1 | 0.2 | 20 | 0.4 | 30 | 20 s | 0.1 |",
        "| at 0.01 | 0.7 | 30 | 0.7 | 30 | 20 s | 0.01 |",
        "| at 1.0 | 0.9 | 10 | - | 30 | 20 s | 1.0 |",
    ]
    assert printed.err.endswith(f"because they hold no run's metrics: {three[-1]}\n")


def test_more_of_another_metric_is_better_and_json_has_the_table(report, three, capsys):
    assert report(*three, "--metric", "val_f1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["metric"], found["best"]) == ("val_f1", "highest")
    assert found["runs"][0]["settings"].keys() == {"lr"}
    assert [(run["best"], run["best_step"]) for run in found["runs"]] == [(2.0, 30)] * 3


def test_a_page_of_two_runs_comes_with_their_table(report, three, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert report(*three[:2]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 runs by val_loss")
    assert out.endswith("wrote report.html: open it in a browser\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{run}x"], "there is no folder"),
        (["{run}/config.json"], "is a file"),
        ([], "name a run, or several to compare. Type: hvdtrain report runs/NAME"),
        (["{run}", "--out", "{run}/no/page.html"], "--out: there is no folder"),
        (["{run}", "{run}", "{run}", "--out", "x"], "are for a page, which shows one run or two"),
        (["{run}", "{run}", "{run}", "--metric", "x"], "no run has the metric x. There are: loss"),
        (["{run}", "--metric", "loss"], "--metric is for a table of several runs"),
        (["{run}", "{run}", "--metric", "loss", "--json"], "--metric with --json is for three runs or more"),
        (["{run}", "--link", "1Gb/s"], "--link needs --measured"),
        (["{run}", "{run}", "--measured", "{run}/config.json"], "--measured is for one run"),
        (["{run}", "--measured", "x"], "--measured must be a file. There is none at x"),
        (["{run}", "--measured", "{run}/metrics.jsonl"], "is not JSON"),
        (["{run}", "--measured", "{run}/config.json"], 'has no object "plan_input"'),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(report, run, capsys, arguments, said):
    assert report(*(each.format(run=run) for each in arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("hvdtrain report: ")
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_without_matplotlib_it_says_what_to_install_and_json_works(run):
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from hvdtrain.cli import program as cli\n"
        "sys.argv = ['hvdtrain', 'report', *sys.argv[1:]]; cli.main()\n"
    )
    call = [sys.executable, "-c", code, str(run)]
    done = subprocess.run(call, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Type: pip install matplotlib" in done.stderr
    assert done.stderr.count("\n") == 1
    done = subprocess.run([*call, "--json"], capture_output=True, text=True)
    assert (done.returncode, json.loads(done.stdout)["ranks"]) == (0, 2)
