from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from in_process import assert_refused, plan
from in_process import document as rows

from hvdtrain.cli.plan import rank_counts
from hvdtrain.tools.plan.model import read_measured

VGG = ["--step", "416ms", "--gradients", "553MB", "--batch-size", "64"]
LINK = ["--link", "25Gb/s", "--ranks-per-host", "4", "--intra", "10GB/s"]


def test_json_has_a_row_for_each_power_of_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = rows(monkeypatch, capsys, *VGG, *LINK, "--price", "2", "--samples", "6400000")
    assert [row["ranks"] for row in document["forecast"]] == [2**power for power in range(13)]
    alone = document["forecast"][0]
    assert alone["step_s"] == document["step"]["compute_s"] == 0.416
    assert alone["samples_per_s"] == pytest.approx(64 / 0.416)
    assert alone["run_s"] == pytest.approx(100_000 * 0.416)
    assert alone["cost"] == pytest.approx(2 * 100_000 * 0.416 / 3600)
    assert alone["added_rank_brings"] is None
    assert document["cluster"]["link_bytes_per_s"] == 25e9 / 8
    assert document["pays_up_to_ranks"] == 4096


def test_the_table_explains_its_columns_and_says_where_ranks_stop_paying(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = ["--link", "25Gb/s", "--latency", "200us", "--algorithm", "ring", "--spread", "2ms", "--price", "2"]
    stop = rows(monkeypatch, capsys, *VGG, *slow)["pays_up_to_ranks"]
    assert 1 < stop < 4096
    assert plan(monkeypatch, *VGG, *slow) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ +4096 .* s .*%", printed, re.MULTILINE)
    words = " ".join(printed.split())
    for term in ("T_comp: 416 ms", "T_sync: all allreduces", "Overlap: they run beside backward", "waiting"):
        assert term in words
    assert f"stops paying after {stop} ranks (an added rank must bring 50% of a lone rank's work" in words
    assert re.search(r"A sample costs \d\.\d\d times what it costs on one rank", words)
    assert "would help" in words


def test_a_link_too_slow_for_two_ranks_is_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, *VGG, "--link", "100Mb/s") == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "Adding ranks does not pay here" in words
    assert "most of T_sync is bandwidth: a faster link" in words


def test_one_host_needs_no_link(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--intra", "3.9GB/s", "--ranks-per-host", "6", "--max-ranks", "6"]
    assert [row["ranks"] for row in rows(monkeypatch, capsys, *VGG, *arguments)["forecast"]] == [1, 2, 4, 6]


def test_a_measured_step_is_taken_from_a_file_and_options_win(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "bench.json"
    measured = {"step_s": 0.1, "gradient_bytes": 8e7, "samples_per_step": 32, "backward_share": None, "ranks": 2}
    path.write_text(json.dumps({"plan_input": measured | {"intra_bytes_per_s": 4e9, "overhead_s": 2e-4}}))
    document = rows(monkeypatch, capsys, "--measured", str(path), "--link", "1GB/s", "--step", "200ms")
    step, cluster = document["step"], document["cluster"]
    assert (step["compute_s"], step["gradient_bytes"], step["samples"]) == (0.2, 8e7, 32)
    assert step["backward_share"] == pytest.approx(2 / 3)
    assert (cluster["intra_bytes_per_s"], cluster["overhead_s"]) == (4e9, 2e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [*VGG, "--link", "-25Gb/s"],
            "hvdtrain plan: --link: a data rate cannot be negative. Received: '-25Gb/s'",
        ),
        ([*VGG, "--link", "25"], "--link: '25' is not a data rate: write a number and one of b/s"),
        ([*VGG, "--link", "0Gb/s"], "the link's speed (bytes per second) must be above 0 and finite. Received: 0.0"),
        ([*VGG], "--link missing: give the speed between hosts"),
        ([*VGG, "--link", "25Gb/s", "--ranks-per-host", "4"], "--intra missing: several ranks share a host"),
        (["--step", "0ms", *VGG[2:], *LINK], "the step's time (seconds) must be above 0 and finite. Received: 0.0"),
        (["--step", "5", *VGG[2:], *LINK], "'5' is not a time"),
        ([*VGG[:4], *LINK], "--batch-size missing: give it, or a --measured file"),
        (LINK, "--step, --gradients, --batch-size missing: give them, or a --measured file"),
        ([*VGG, *LINK, "--backward-share", "1.2"], "backward's share of the step must be above 0 and at most 1"),
        (
            [*VGG, *LINK, "--price", "-1"],
            "the price of a rank for an hour must be 0 or above, and finite. Received: -1.0",
        ),
        (
            [*VGG, *LINK, "--price", "nan"],
            "the price of a rank for an hour must be 0 or above, and finite. Received: nan",
        ),
        (
            [*VGG, *LINK, "--price", "inf"],
            "the price of a rank for an hour must be 0 or above, and finite. Received: inf",
        ),
        ([*VGG, *LINK, "--overlap", "nan"], "overlap must be from 0 to 1. Received: nan"),
        ([*VGG, *LINK, "--samples", "0"], "the samples of the run must be above 0"),
        ([*VGG, *LINK, "--samples", "9" * 400], "the samples of the run must be above 0 and finite. Received: 999"),
        ([*VGG[:4], *LINK, "--batch-size", "9" * 400], "a rank's samples in a step must be above 0 and finite"),
        ([*VGG, *LINK[:2], "--ranks-per-host", "9" * 400], "ranks per host must be above 0 and finite"),
        ([*VGG, *LINK, "--worth", "2"], "what an added rank must be worth must be above 0 and at most 1"),
        ([*VGG, *LINK, "--max-ranks", "0"], "the largest number of ranks must be from 1 to 1048576. Received: 0"),
        ([*VGG, *LINK, "--algorithm", "trees"], "Received: trees. Did you mean tree?"),
        (["--measured", "/nowhere/bench.json", *LINK], "--measured must be a file. There is none at /nowhere"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert_refused(monkeypatch, capsys, arguments, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", 'has no object "plan_input": write it with hvdtrain bench'),
        ('{"plan_input": 1}', 'has no object "plan_input"'),
        ('{"plan_input": {"step_s": "0.1"}}', "plan_input.step_s must be a number. Received: '0.1'"),
        ('{"plan_input": {"step_s": true}}', "plan_input.step_s must be a number. Received: True"),
    ],
)
def test_a_file_that_is_no_measurement_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_measured(path)


def test_rank_counts_end_at_the_largest() -> None:
    assert rank_counts(1) == [1]
    assert rank_counts(8) == [1, 2, 4, 8]
    assert rank_counts(12) == [1, 2, 4, 8, 12]
