from __future__ import annotations

import dataclasses
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hvdtrain.cli import program
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.telemetry.step_times import MARK, RankReport, Spread, StepSummary
from hvdtrain.tools.bench import report, run, worker
from hvdtrain.tools.bench.launch import BenchError, LaunchOutcome
from hvdtrain.tools.bench.report import RankSteps, Steps
from hvdtrain.tools.bench.sweep import Fit, Point

FACTS = {"gradient_bytes": 4000, "samples_per_step": 32, "framework": "torch", "device": "cpu", "cores": 2}


def summary(compute: float, wait: float, data: float, backward: float | None = None) -> StepSummary:
    whole = compute + wait + data
    own = compute + data
    steps, alone = Spread(whole, whole - 0.5, whole + 0.5), Spread(own, own - 0.01, own + 0.01)
    return StepSummary(20, steps, alone, compute, wait, data, backward)


def two() -> Steps:
    return Steps([RankSteps(0, summary(1.0, 0.5, 0.1), FACTS), RankSteps(1, summary(1.3, 0.2, 0.1, 0.7), FACTS)])


def times(rank: int, *, taken: int = 23, told: StepSummary | None = None, **facts: Any) -> RankReport:
    return RankReport(rank, 2, taken, told, facts)


def outcome(status: int | None, *reports: RankReport, output: str = "") -> LaunchOutcome:
    lines = [(each.rank, f"{MARK}{each.to_json()}") for each in reports]
    return LaunchOutcome(status, [*lines, *((None, line) for line in output.splitlines())])


def test_the_slowest_rank_is_the_one_the_others_wait_for() -> None:
    found = two()
    assert (found.slowest.rank, found.fastest.rank) == (1, 0)


def test_plan_gets_a_step_without_communication() -> None:
    found = two().plan_input(Fit(1e-4, 1e-9, 0.1))
    assert found == {
        "step_s": pytest.approx(1.4),
        "spread_s": pytest.approx(0.02 / 1.349),
        "ranks": 2,
        "gradient_bytes": 4000,
        "samples_per_step": 32,
        "framework": "torch",
        "backward_share": pytest.approx(0.5),
        "overhead_s": pytest.approx(1e-4),
        "intra_bytes_per_s": pytest.approx(1e9),
    }


def test_plan_takes_no_link_between_hosts_for_a_speed_within_one() -> None:
    ranks = [RankSteps(each.rank, each.summary, {**FACTS, "host": f"h{each.rank}"}) for each in two().ranks]
    assert not {"intra_bytes_per_s", "overhead_s"} & set(Steps(ranks).plan_input(Fit(1e-4, 1e-9, 0.1)))


def test_plan_is_not_told_what_was_not_measured() -> None:
    found = Steps([RankSteps(0, summary(1.0, 0.0, 0.0), {})]).plan_input(None)
    assert set(found) == {"step_s", "spread_s", "ranks"}
    assert "intra_bytes_per_s" not in two().plan_input(Fit(1e-3, 0.0, 0.0))


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (
            outcome(0),
            "train.py ended without using hvdtrain.Trainer, hvdtrain.prepare, hvdtrain.torch or hvdtrain.keras",
        ),
        (outcome(0, times(1, taken=0), times(0, taken=0)), "train.py never took a step on rank 0"),
        (outcome(0, times(0, told=summary(1, 0, 0))), "train.py ended without a report of rank 1 of 2"),
        (outcome(0, times(0, taken=4), times(1, taken=4)), "took 4 steps on rank 0. At least 5 are needed"),
        (
            outcome(None, times(0, told=summary(1, 0, 0))),
            "train.py was ended after 9 s (--timeout), before every rank had reported: 1 of 2",
        ),
        (
            outcome(1, output="Traceback (most recent call last):\n  x\nValueError: boom\n"),
            "train.py failed, horovodrun's exit status is 1; the launcher raised ValueError: boom",
        ),
    ],
)
def test_a_script_that_cannot_be_measured_gets_a_clear_word(ended: LaunchOutcome, said: str) -> None:
    with pytest.raises(BenchError) as error:
        report.from_script(ended, name="train.py", ranks=2, timeout_s=9)
    assert said in str(error.value)


def test_a_report_that_was_cut_off_is_an_error() -> None:
    with pytest.raises(BenchError, match="a rank's report cannot be read"):
        report.from_script(LaunchOutcome(0, [(0, f"{MARK}{{")]), name="a", ranks=1, timeout_s=9)


def test_a_report_of_the_standard_model_that_was_cut_off_is_an_error() -> None:
    with pytest.raises(BenchError, match="a rank's report cannot be read"):
        run._report_of(LaunchOutcome(0, [(0, f"{worker.MARK}{{")]), 9)


def test_ranks_that_had_reported_their_steps_may_end_badly() -> None:
    whole = [times(rank, told=summary(1, 0, 0), stopped=True) for rank in (1, 0)]
    for status in (None, 0, 134):
        found = report.from_script(outcome(status, *whole), name="a", ranks=2, timeout_s=9)
        assert [each.rank for each in found.ranks] == [0, 1]


def test_a_script_that_raised_after_enough_steps_has_failed_all_the_same() -> None:
    whole = [times(rank, told=summary(1, 0, 0)) for rank in (0, 1)]
    with pytest.raises(BenchError, match="failed"):
        report.from_script(outcome(1, *whole), name="a", ranks=2, timeout_s=9)


def result() -> report.Result:
    copy = Spread(1e10, 9e9, 2e10)
    points = [
        Point(4, Spread(1e-3, 9e-4, 2e-3), 50, copy, 4e-10),
        Point(1 << 20, Spread(2e-3, 1e-3, 3e-3), 50, copy, (1 << 20) / 1e10),
    ]
    return report.Result(
        title="a title", steps=two(), advice={"noisy": "Measure [again]."}, points=points, fit=Fit(1e-3, 1e-9, 0.01),
        notes=["a note"],
    )  # fmt: skip


def test_json_holds_si_units_and_what_plan_reads() -> None:
    told = json.loads(json.dumps(report.as_json(result())))
    assert [point["bytes"] for point in told["allreduce"]] == [4, 1 << 20]
    last = told["allreduce"][-1]
    assert last["floor_s"] == pytest.approx((1 << 20) / 1e10)
    assert last["bus_bytes_per_s"] == pytest.approx((1 << 20) / 2e-3)
    assert last["floor_share"] == pytest.approx(last["floor_s"] / last["time_s"]["median"])
    assert told["fit"]["how"].startswith("least squares of relative errors")
    assert told["plan_input"]["step_s"] == pytest.approx(1.4)
    assert told["slowest_rank"] == 1
    for each in told["steps"]:
        assert each["compute_s"] + each["communication_s"] + each["data_s"] == pytest.approx(each["step_s"]["median"])


def printed(what: report.Result) -> str:
    stream = io.StringIO()
    report.show(what, Console(file=stream, width=80, soft_wrap=True))
    return stream.getvalue()


def test_tables_fit_80_columns_and_name_the_slowest_rank() -> None:
    text = printed(result())
    tables = [line for line in text.splitlines() if ("ms" in line and "Slowest" not in line) or "─" in line]
    assert tables
    assert all(len(line) <= 80 for line in tables)
    assert "Slowest: rank 1, 1.4 s a step without the wait; the fastest takes 1.1 s" in text
    assert "- Measure [again]." in text
    assert "a note" in text


@pytest.mark.parametrize(
    ("exchanges", "line"),
    [(None, None), (3, "exchanged weights 3 times"), (0, "exchanged no weights in these steps. Measure more --steps")],
)
def test_the_report_says_how_often_ranks_exchanged_weights(exchanges: int | None, line: str | None) -> None:
    found = result()
    ranks = [replace(each, summary=replace(each.summary, exchanges=exchanges)) for each in found.steps.ranks]
    text = printed(replace(found, steps=Steps(ranks)))
    assert (line in text) if line else "exchanged" not in text


def test_what_a_step_holds_is_a_table_and_what_plan_reads() -> None:
    memory = {"weights": 5e6, "gradients": 4e6, "optimizer": 9e6, "buckets": 0, "activations": None}
    ranks = [RankSteps(each.rank, each.summary, {**FACTS, "memory": memory}) for each in two().ranks]
    found = dataclasses.replace(result(), steps=Steps(ranks))
    lines = printed(found)
    (row,) = [line.split() for line in lines.splitlines() if line.split()[-2:] == ["18", "MB"] and " 1 " in line]
    assert row == ["1", "5", "MB", "4", "MB", "9", "MB", "0", "B", "?", "18", "MB"]
    assert 'The largest is optimizer state: shard="optimizer" leaves 1/2 of it on each of 2 ranks.' in lines
    script = [dataclasses.replace(each, facts=each.facts | {"in_script": True}) for each in ranks]
    lines = printed(dataclasses.replace(found, steps=Steps(script)))
    assert "The largest is optimizer state: hvd.DistributedOptimizer(shard_state=True) leaves 1/2 of it on" in lines
    planned = found.steps.plan_input(None)
    assert (planned["weights"], planned["optimizer"], planned["buckets"]) == (5e6, 9e6, 0)
    assert "activations" not in planned


def test_without_advice_the_report_says_so() -> None:
    found = result()
    found.advice.clear()
    assert "Nothing to advise" in printed(found)


def test_without_a_speed_there_is_no_floor() -> None:
    points = [replace(point, floor_s=None) for point in result().points]
    no_floor = report.Result(title="t", steps=two(), advice={}, points=points)
    assert report.as_json(no_floor)["allreduce"][0]["floor_s"] is None
    assert "-" in printed(no_floor)
    assert run.floor_notes(points, None, LaunchSpec(ranks=2, hosts={}))[0].startswith("No floor: give the speed")


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (LaunchSpec(ranks=2, hosts={}), "joined by nothing but such a link"),
        (LaunchSpec(ranks=8, hosts={"a": 4, "b": 4}), "a flat ring over all N=8 ranks"),
        (LaunchSpec(ranks=8, hosts={"a": 4, "b": 4}), "the link of each of the H=2 hosts: 57% of it"),
        (LaunchSpec(ranks=2, hosts={"a": 1, "b": 1}), "the link's 3.12 GB/s. Times are the slowest rank's."),
    ],
)
def test_the_floor_over_a_link_says_whose_it_is(hosts: LaunchSpec, said: str) -> None:
    assert said in run.floor_notes(result().points, 25e9 / 8, hosts)[0]


def test_quartiles_have_the_medians_unit() -> None:
    assert report.quartiles_of(Spread(9.5e-4, 8.8e-4, 1.1e-3)) == "880 - 1,100 us"


@pytest.mark.parametrize(("num_bytes", "text"), [(4, "4 B"), (1024, "1 KiB"), (64 << 20, "64 MiB"), (1 << 30, "1 GiB")])
def test_sizes_have_their_unit(num_bytes: int, text: str) -> None:
    assert report.size_of(num_bytes) == text


def test_advice_is_on_the_slowest_ranks_step() -> None:
    facts = run.advice_facts(two(), spec=LaunchSpec(ranks=2, hosts={}), link=None, fit=None)
    assert (facts.slowest, facts.ranks, facts.hosts) == (1, 2, 1)
    assert facts.communication == pytest.approx(0.2 / 1.6)
    assert facts.lag == pytest.approx(0.3 / 1.6)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-np", "0"], "-np must be a whole number, at least 1"),
        (["-np", "1000"], "-np 1000 is more than 4 ranks for each"),
        (["-np", "3", "-H", "localhost:2"], "-np 3 is more than the 2 slots of localhost:2"),
        (["--link", "-25Gb/s"], "--link: a data rate cannot be negative"),
        (["--link", "0Gb/s"], "--link must be above zero"),
        (["--link", "25"], "--link: '25' is not a data rate"),
        (["--max-bytes", "-4"], "--max-bytes must be at least 4"),
        (["--timeout", "0"], "--timeout must be above zero"),
        (["--timeout", "nan"], "--timeout must be above zero seconds and finite. Received: nan"),
        (["--timeout", "inf"], "--timeout must be above zero seconds and finite. Received: inf"),
        (["--steps", "-1"], "--steps must be at least 2"),
        (["--steps", "0"], "--steps must be at least 2"),
        (["--script", __file__, "--steps", "1"], "--steps must be at least 2"),
        (["--script", "missing.py"], "--script must be a file. There is none at missing.py"),
        (["--script", __file__, "--quick"], "are for the standard model, not for --script"),
        (["--", "--epochs", "3"], "arguments are a script's: give --script. Received: --epochs 3"),
    ],
)
def test_bad_input_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "bench", *arguments])
    with pytest.raises(SystemExit) as info:
        program.main()
    assert info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hvdtrain bench: ")
    assert said in line


def test_the_command_line_reaches_the_script_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[run.BenchOptions] = []
    monkeypatch.setattr(run, "run", asked.append)
    script = tmp_path / "train.py"
    script.touch()
    arguments = [
        "-np",
        "4",
        "-H",
        "a:4",
        "--script",
        str(script),
        "--steps",
        "7",
        "--json",
        "--",
        "--epochs",
        "3",
        "-v",
    ]
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "bench", *arguments])
    with pytest.raises(SystemExit) as info:
        program.main()
    assert info.value.code == 0
    (options,) = asked
    assert (options.ranks, options.hosts, options.script, options.steps) == (4, "a:4", script, 7)
    assert list(options.arguments) == ["--epochs", "3", "-v"]
    assert options.as_json
