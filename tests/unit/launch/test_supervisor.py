"""Decisions of `supervisor.run` after a start of the job has ended, without starting anything."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.launch import exit_cause, supervisor
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.launch.exit_cause import Cause
from hvdtrain.launch.job import Launch

Run = Callable[[int], int]


@pytest.fixture
def requests() -> list[signal.Signals]:
    return []


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: list[signal.Signals]) -> Run:
    """Each start fails after a step more; takes the number of restarts, and returns the exit status."""

    @contextlib.contextmanager
    def supervision(*_: Any) -> Iterator[Any]:
        yield None, SimpleNamespace(requests=requests, wait=lambda seconds: bool(requests))

    steps = iter(range(100))
    job = SimpleNamespace(end=lambda: True, listener=exit_cause.Listener("h"))
    monkeypatch.setattr(supervisor, "_supervision", supervision)
    monkeypatch.setattr(supervisor, "Job", lambda *_: job)
    monkeypatch.setattr(supervisor, "_follow", lambda *_: (Cause("rank 1 on host h", 3, 1), 1.0))
    monkeypatch.setattr(exit_cause, "first_error", lambda *_, **__: None)
    monkeypatch.setattr(exit_cause, "latest_step", lambda *_, **__: next(steps))
    return lambda restarts: supervisor.run(Launch(LaunchSpec(), (), {}, max_restarts=restarts), tmp_path)


def test_without_other_hosts_nothing_asks_how_long_to_wait_for_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDTRAIN_STALL_S", "x")
    assert run(1) == 3


def test_a_signal_after_the_jobs_end_does_not_hide_why_it_ended(
    run: Run, requests: list[signal.Signals], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exit_cause, "first_error", lambda *_, **__: requests.append(signal.SIGTERM))
    assert run(0) == 3
    assert "gave up after 1 attempt, because --max-restarts is 0: rank 1 on host h" in capsys.readouterr().err


def test_a_signal_before_a_restart_stops_the_job(
    run: Run, requests: list[signal.Signals], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exit_cause, "first_error", lambda *_, **__: requests.append(signal.SIGTERM))
    assert run(1) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM before the restart" in capsys.readouterr().err


@pytest.mark.parametrize("is_printed", [True, False])
def test_the_first_error_is_one_line_if_its_traceback_is_on_the_screen(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_printed: bool
) -> None:
    error = exit_cause.RankError(1, "h", "Traceback (most recent call last):\nValueError: x", is_printed)
    monkeypatch.setattr(exit_cause, "first_error", lambda *_, **__: error)
    run(0)
    said = capsys.readouterr().err
    assert ("its traceback is above): ValueError: x" in said) == is_printed
    assert ("Traceback (most" in said) != is_printed


def test_a_stop_before_the_first_step_is_said_as_one(
    run: Run, requests: list[signal.Signals], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any) -> tuple[Cause, float]:
        requests.append(signal.SIGINT)
        return Cause("rank 1 on host h", 128 + signal.SIGTERM, 1), 1.0

    monkeypatch.setattr(supervisor, "_follow", stopped)
    monkeypatch.setattr(exit_cause, "latest_step", lambda *_, **__: None)
    assert run(3) == 128 + signal.SIGINT
    assert capsys.readouterr().err.splitlines()[-1].endswith("stopped by SIGINT; no rank had recorded a step")
