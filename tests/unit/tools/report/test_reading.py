"""Reading a run's folder, however the run ended."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hvdtrain.errors import UsageError
from hvdtrain.tools.report.reading import read_run


def test_half_a_line_after_a_kill_is_left_out_and_said(made, interval):
    run = read_run(made([interval(1), interval(2)], tail='{"kind": "interval", "global_st'))
    assert run.intervals.step.tolist() == [1, 2]
    assert run.notes == ["1 line of metrics.jsonl could not be read (cut off by a kill, or not a run's) and left out."]


def test_steps_that_are_taken_again_count_as_they_were_last(made, interval, epoch):
    first = [
        interval(1, rate=1),
        epoch(5, 0, loss=5.0),
        interval(6, rate=2),
        interval(9, rate=3),
        epoch(10, 1, loss=9.0),
    ]
    again = [interval(6, rate=4), interval(10, rate=5), epoch(10, 1, loss=2.0)]
    run = read_run(made([*first, *again]))
    assert run.starts == 2
    assert run.intervals.step.tolist() == [1, 6, 10]
    assert run.intervals.samples_per_s.tolist() == [1, 4, 5]
    assert run.intervals.start.tolist() == [0, 1, 1]
    assert run.epochs.step.tolist() == [5, 10]
    assert run.epochs.metrics["loss"].tolist() == [5.0, 2.0]


def test_an_epoch_that_ends_in_an_intervals_step_is_no_new_start(made, interval, epoch):
    run = read_run(made([interval(5), epoch(5, loss=1.0), interval(6)]))
    assert (run.starts, run.intervals.step.tolist(), run.epochs.step.tolist()) == (1, [5, 6], [5])


def test_a_start_that_repeats_its_only_line_is_a_new_start(made, interval):
    run = read_run(made([interval(1, rate=1), interval(1, rate=2)]))
    assert (run.starts, run.intervals.samples_per_s.tolist()) == (2, [2])


def test_times_of_a_run_that_did_not_tell_other_apart_are_read(made, interval):
    lines = [interval(1, data=(0.1, 0.2), compute=(1.0, 1.0)), interval(2, data=(0.1, 0.2), compute=(1.0, 1.0))]
    del lines[0]["rank_s"]["other"]
    found = read_run(made(lines)).intervals.rank_s
    np.testing.assert_allclose(found["data"], [[0.1, 0.2]] * 2)
    np.testing.assert_array_equal(found["other"], 0.0)


def test_nulls_missing_metrics_and_ranks_that_come_later_are_nan(made, interval):
    lines = [
        interval(1, metrics={"loss": None, "accuracy": 0.5}),
        interval(2, data=(0.1, 0.2), compute=(0.1, 0.1), metrics={"loss": 2.0}, learning_rate=None),
        interval(3, rank_s=None, metrics=None),
        interval(4, metrics={"loss": "nonsense", "accuracy": True}),
    ]
    run = read_run(made([json.dumps(line) + "\n" for line in lines]))
    np.testing.assert_array_equal(run.intervals.metrics["loss"], [np.nan, 2.0, np.nan, np.nan])
    np.testing.assert_array_equal(run.intervals.metrics["accuracy"], [0.5, np.nan, np.nan, np.nan])
    np.testing.assert_allclose(
        run.intervals.rank_s["data"], [[0.001, np.nan], [0.1, 0.2], [np.nan] * 2, [0.001, np.nan]]
    )
    assert np.isnan(run.rates.metrics["learning_rate"][1])


def test_config_that_is_damaged_costs_a_note_and_not_the_report(made, interval):
    folder = made([interval(1)])
    (folder / "config.json").write_text("{")
    (folder / "environment.json").write_text("[1]")
    run = read_run(folder)
    assert (run.config, run.environment) == ({}, {})
    assert run.notes[0].startswith("config.json could not be read: ")
    assert run.notes[1] == "environment.json holds no JSON object."


@pytest.mark.parametrize(
    "text",
    ["not JSON\n", "[1]\n", '{"kind": "other", "global_step": 1}\n', '{"kind": "epoch", "global_step": null}\n',
     "[" * 99999, '{"kind": "interval"', "\x00\xff\n"],
)  # fmt: skip
def test_a_file_that_no_run_wrote_is_refused(made, text):
    with pytest.raises(UsageError, match="has no whole line that a run wrote"):
        read_run(made([text]))


def test_what_to_type_instead_is_said(made, tmp_path, interval):
    folder = made([interval(1)], name="first")
    runs = folder.parent
    empty = made([], name="empty")
    (tmp_path / "bare").mkdir()
    for path, said in (
        (runs / "frist", f"there is no folder {runs / 'frist'}. Try: hvdtrain report {folder}"),
        (tmp_path / "none" / "x", "Runs are in runs/, see: ls runs"),
        (runs, f"It holds runs; try: hvdtrain report {runs}"),
        (tmp_path / "bare", "has no metrics.jsonl, so it is no run's folder"),
        (folder / "metrics.jsonl", f"Give its folder: hvdtrain report {folder}"),
        (folder / "config.json", "is a file. Give the folder of a run"),
        (empty, "is empty: wait for the first step"),
    ):
        with pytest.raises(UsageError) as info:
            read_run(path)
        assert said in str(info.value)
        assert "\n" not in str(info.value)


def test_what_lies_between_two_starts_is_not_training(made, interval):
    lines = [*(interval(step) for step in (1, 4, 5)), *(interval(step, time=2e9 + step) for step in (5, 9))]
    run = read_run(made(lines))
    assert (run.starts, run.seconds) == (2, 3.0 + 4.0)
    assert read_run(made([interval(1, time=None)], name="untold")).seconds is None


def test_learning_rates_of_steps_and_intervals_are_one_curve(made, interval):
    step = {"time": 1e9, "kind": "step", "epoch": 0, "step": 2, "global_step": 2, "learning_rate": 0.05}
    run = read_run(made([interval(1), step, interval(3)]))
    assert run.rates.step.tolist() == [1, 2, 3]
    assert run.rates.metrics["learning_rate"].tolist() == [0.1, 0.05, 0.1]
    assert run.intervals.step.tolist() == [1, 3]
    assert run.notes == []
