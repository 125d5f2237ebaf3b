from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdtrain.launch import job
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.system import open_mpi

# Says which signals it was started deaf to, then waits to be asked.
PROGRAM = f"""#!{sys.executable} -I
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
with open("blocked.new", "w") as file:
    file.write(" ".join(str(int(number)) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())))
os.rename("blocked.new", "blocked")
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., job.Job]]:
    monkeypatch.chdir(tmp_path)
    guard = job.Guard(tmp_path)
    jobs: list[job.Job] = []

    def begin(name: str, **hosts: int) -> job.Job:
        program = tmp_path / name
        program.write_text(PROGRAM)
        program.chmod(0o755)
        line = [str(program)]
        spec = LaunchSpec(name, hosts=hosts)
        jobs.append(job.Job(job.Launch(spec, line, dict(os.environ)), tmp_path, guard))
        deadline = time.monotonic() + 30
        while not (tmp_path / "blocked").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return jobs[-1]

    yield begin
    for each in jobs:
        each.end()
    guard.dismiss()


@pytest.mark.parametrize(("name", "deaf"), [("mpirun", {signal.SIGTERM}), ("horovodrun", set())])
def test_mpirun_alone_does_not_hear_a_schedulers_sigterm(
    start: Callable[..., job.Job], tmp_path: Path, name: str, deaf: set[int]
) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    start(name)
    assert {int(number) for number in (tmp_path / "blocked").read_text().split()} == deaf
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_ranks_that_are_all_on_other_hosts_are_asked_through_mpirun(start: Callable[..., job.Job]) -> None:
    running = start("mpirun", **{"192.0.2.77": 2})
    running.request_stop({})
    deadline = time.monotonic() + 30
    while running.status() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert running.status() == 75
    assert not running.request_stop({})


def test_the_end_of_patience_reaches_mpirun(start: Callable[..., job.Job]) -> None:
    running = start("mpirun")
    running.send(signal.SIGTERM)
    deadline = time.monotonic() + 30
    while running.status() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert running.status() == -signal.SIGINT


def test_ranks_lines_come_whole_and_without_frameworks_notes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = "[1,0]<stderr>:I0000 00:00:17.8 2 port.cc:153] oneDNN\n"
    text += "[1,0]<stderr>:W0000 la[1,1]<stderr>:one\n[1,0]<stderr>:st\n"
    guard = job.Guard(tmp_path)
    line = [sys.executable, "-c", f"import os; os.write(2, {text!r}.encode())"]
    running = job.Job(job.Launch(LaunchSpec(), line, dict(os.environ)), tmp_path, guard)
    deadline = time.monotonic() + 30
    while running.status() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.end()
    guard.dismiss()
    assert capfd.readouterr().err.splitlines() == ["[1,1]<stderr>:one", "[1,0]<stderr>:W0000 last"]


def test_which_open_mpi_it_is_was_asked_before_the_launcher_may_have_ended(
    start: Callable[..., job.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[None] = []
    monkeypatch.setattr(open_mpi, "spaces_marks", lambda: asked.append(None))
    start("horovodrun")
    assert asked
