"""The lines and the display on rank 0."""

from __future__ import annotations

import dataclasses
import io
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.callbacks import Progress, progress
from hvdtrain.telemetry.interval import Interval, RankTimes


def trainer(*, rank=0, steps=100, size=2):
    world = SimpleNamespace(is_root=rank == 0, size=size)
    hosts = ["a", "b"][:size]
    return SimpleNamespace(world=world, epochs=3, steps_per_epoch=steps, hosts=hosts, decisions=[], config={})


def interval(step, *, steps=10, seconds=1.0, size=2):
    one = np.full(size, seconds / steps)
    times = RankTimes(one, 0.1 * one, 0.8 * one, np.linspace(0.3, 0.2, size) * one, 0.1 * one)
    return Interval(1, step, 100 + step, steps, 3200, seconds, times, 0.05, {"loss": 0.5, "accuracy": 0.75})


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def watch(shown, clock, *intervals, rank=0, steps=100):
    run = trainer(rank=rank, steps=steps)
    shown.on_fit_begin(run)
    for each in intervals:
        clock[0] += each.seconds
        shown.on_interval(run, each)
    shown.on_epoch_end(run, 1, {"loss": 0.5, "samples_per_s": 3200.0, "seconds": 2.0})
    shown.on_fit_end(run)
    shown.close()


def test_lines_tell_all_that_a_person_asks_for(capsys, clock):
    watch(Progress("lines", every_s=2), clock, interval(10), interval(20), interval(30))
    first, epoch, summary = capsys.readouterr().out.splitlines()
    # 80 steps of this epoch and 100 of the last are left, at 0.1 s.
    assert first == ("epoch 2/3  step 20/100  loss 0.5000  accuracy 0.7500  3,200 samples/s  lr 0.05  18 s left")
    assert epoch == "epoch 2/3  loss 0.5000  3,200 samples/s  2.0 s"
    assert summary == (
        "trained for 3 s: a step 100.0 ms, compute 60 %, data 10 %, reduction 20 %, other 10 % (rank 1 on host b)"
    )


def test_a_long_run_says_how_slow_the_slowest_rank_was(capsys, clock):
    watch(Progress("lines"), clock, *[interval(10 * i) for i in range(1, 13)])
    assert capsys.readouterr().out.splitlines()[-1].endswith("(rank 1 on host b, the slowest: 14 % above the median)")


def test_one_process_waits_for_nobody(capsys, clock):
    times = RankTimes(*np.array([[0.1], [0.04], [0.04], [0.0], [0.0]]))
    shown, run = Progress("lines"), trainer(size=1)
    shown.on_fit_begin(run)
    shown.on_interval(run, dataclasses.replace(interval(10, size=1), times=times))
    shown.on_fit_end(run)
    assert capsys.readouterr().out.endswith("compute 50 %, data 50 %, other 0 %\n")


def test_the_shares_of_a_step_add_up(capsys, clock):
    one, third = np.full(2, 0.1), np.full(2, 0.1 / 3)
    times = RankTimes(one, third, third, third / 3, np.zeros(2))  # the last third is waiting, in a callback
    watch(Progress("lines"), clock, dataclasses.replace(interval(10), times=times))
    said = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r"waiting elsewhere 3[34] %", said)
    assert sum(map(int, re.findall(r"(\d+) %", said))) == 100


def test_what_was_decided_is_shown_unless_the_log_says_it(capsys, caplog):
    run = trainer()
    run.decisions = ["effective batch 64 samples (32 x 2 ranks)"]
    for style in ("lines", "epochs", "off"):
        Progress(style).on_fit_begin(run)
    assert capsys.readouterr().out == "effective batch 64 samples (32 x 2 ranks)\n"
    caplog.set_level("INFO", "hvdtrain")
    Progress("lines").on_fit_begin(run)
    assert capsys.readouterr().out == ""


def test_what_is_decided_during_an_epoch_is_shown_before_its_metrics(capsys):
    run, progress = trainer(), Progress("lines")
    progress.on_fit_begin(run)
    run.decisions.append("cutoff: 2 of 9 steps were closed before all ranks were done")
    progress.on_epoch_end(run, 0, {"loss": 0.5})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == run.decisions[0]
    assert said[1].startswith("epoch 1/3")
    progress.on_epoch_end(run, 1, {"loss": 0.5})
    assert run.decisions[0] not in capsys.readouterr().out


def test_where_the_length_is_unknown_nothing_is_made_up(capsys, clock):
    watch(Progress("lines", every_s=0), clock, interval(10), steps=None)
    assert (
        capsys.readouterr()
        .out.splitlines()[0]
        .endswith("step 10  loss 0.5000  accuracy 0.7500  3,200 samples/s  lr 0.05")
    )


@pytest.mark.parametrize(("style", "lines"), [("off", 0), ("epochs", 1), ("lines", 3)])
def test_it_can_be_quieter(capsys, clock, style, lines):
    watch(Progress(style, every_s=0.5), clock, interval(10))
    assert len(capsys.readouterr().out.splitlines()) == lines


def test_other_ranks_print_nothing(capsys, clock):
    watch(Progress("lines", every_s=0), clock, interval(10), rank=1)
    watch(Progress("live"), clock, interval(10), rank=1)
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_display_that_is_gone_at_the_end(monkeypatch, clock):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    shown = Progress()
    watch(shown, clock, interval(10), interval(60))
    text = screen.getvalue()
    assert "60/100" in text
    assert "accuracy 0.7500" in text
    assert "\x1b[?25h" in text[text.rindex("\x1b[?25l") :]  # the cursor is back
    assert "epoch 2/3  loss 0.5000  3,200 samples/s  2.0 s\n" in text


def drawn(screen):
    """Return the display's two lines as they were drawn last, without colours."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    return [line.split("\r")[-1].rstrip() for line in plain.split("\n")[-2:]]


def test_80_columns_hold_the_steps_and_what_a_person_asks_for(monkeypatch, clock):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    shown, run = Progress(), trainer()
    shown.on_fit_begin(run)
    shown.on_interval(run, interval(60))
    shown._live.refresh()
    bar, words = drawn(screen)
    assert re.fullmatch(r"epoch 2/3 \S{30,}.*? 60/100 14 s left", bar), bar
    assert words == "loss 0.5000  accuracy 0.7500  3,200 samples/s  lr 0.05"
    assert max(map(len, (bar, words))) <= 80
    shown.on_epoch_begin(run, 2)  # the next one, of which there is no interval yet
    shown._live.refresh()
    bar, words = drawn(screen)
    assert re.fullmatch(r"epoch 3/3 \S{30,} +0/100", bar), bar
    assert words == ""
    shown.close()


def test_a_launchers_terminal_gets_lines(monkeypatch, clock):
    """Under mpirun each rank has one, whose output comes out with a prefix before each line."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    watch(Progress(every_s=0), clock, interval(10))
    assert "\x1b" not in screen.getvalue()
    assert len(screen.getvalue().splitlines()) == 3


def test_an_error_in_training_leaves_the_terminal_as_it_was(monkeypatch, clock):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    shown = Progress("live")
    shown.on_fit_begin(trainer())
    shown.close()
    assert "\x1b[?25h" in screen.getvalue()


def test_nobody_who_reads_is_no_reason_to_stop(monkeypatch, clock, caplog):
    monkeypatch.setattr(sys, "stdout", None)
    watch(Progress(), clock, interval(10))

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError("nobody reads")

    monkeypatch.setattr(sys, "stdout", Closed())
    watch(Progress("lines", every_s=0), clock, interval(10), interval(20))
    assert [record.getMessage() for record in caplog.records] == ["progress is shown no more: nobody reads"]


def test_the_environment_chooses_for_scripts_that_do_not(monkeypatch, capsys, clock):
    monkeypatch.setenv(progress.VARIABLE, "off")
    watch(Progress(), clock, interval(10))
    assert capsys.readouterr().out == ""
    monkeypatch.setenv(progress.VARIABLE, "loud")
    with pytest.raises(ValueError, match="HVDTRAIN_PROGRESS must be one of auto, live, lines, epochs, off"):
        Progress()


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.6, "1:00"), (187, "3:07"), (7387, "2:03:07")])
def test_times_are_short(seconds, text):
    assert progress._clock(seconds) == text
