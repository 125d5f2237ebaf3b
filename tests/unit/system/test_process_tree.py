from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.system import process_tree

# A shell that waits for a rank, which has a child of its own; each says that it is there by a file.
RANK = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)
if {usr1}:
    signal.signal(signal.SIGUSR1, lambda *_: open("heard-usr1", "w").close())
signal.signal(signal.SIGTERM, lambda *_: open("heard-term", "w").close())
child = subprocess.Popen(["sleep", "60"])
open("ready", "w").write(str(os.getpid()))
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(folder: Path, *, usr1: bool = True) -> subprocess.Popen[bytes]:
    environment = {**os.environ, process_tree.RUN_DIR: str(folder), "HOROVOD_RANK": "3"}
    Path("rank.py").write_text(RANK.format(usr1=usr1))
    process = subprocess.Popen(
        ["/bin/sh", "-c", f"{sys.executable} rank.py; true"], env=environment, start_new_session=True
    )
    wait_for(lambda: Path("ready").exists() and bool(Path("ready").read_text()))
    return process


def wait_for(condition: Callable[[], bool], limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_whole_job_is_found_and_ended_also_where_its_parent_is_gone(folder: Path) -> None:
    shell = start(folder)
    assert {p.rank for p in process_tree.members(str(folder)).values()} == {3}
    assert len(process_tree.members(str(folder))) == 3
    shell.kill()
    shell.wait()
    assert len(process_tree.members(str(folder))) == 2
    assert process_tree.end(str(folder))
    assert process_tree.members(str(folder)) == {}


def test_a_program_that_wrote_over_its_environment_is_found_by_its_parent(folder: Path) -> None:
    others = tuple(process_tree.members(str(folder), below=os.getpid()))  # workers of an earlier test's loader
    child = subprocess.Popen(["/bin/sh", "-c", "sleep 60; true"], env={})
    try:
        found = process_tree.members(str(folder), below=os.getpid())
        assert child.pid in found
        assert os.getpid() not in found
        assert child.pid not in process_tree.members(str(folder), below=os.getpid(), without=(child.pid,))
    finally:
        process_tree.end(str(folder), below=os.getpid(), without=others)
        child.wait()


@pytest.mark.parametrize(("usr1", "heard"), [(True, "heard-usr1"), (False, "heard-term")])
def test_a_rank_is_asked_once_by_a_signal_that_it_listens_to(folder: Path, usr1: bool, heard: str) -> None:
    shell = start(folder, usr1=usr1)
    told: set[int] = set()
    try:
        process_tree.request_stop(process_tree.members(str(folder)), requested=told, pids={})
        wait_for(lambda: Path(heard).exists())
        assert told == {int(Path("ready").read_text())}
        Path(heard).unlink()
        process_tree.request_stop(process_tree.members(str(folder)), requested=told, pids={})
        time.sleep(0.2)
        assert not Path("heard-usr1").exists()
        assert not Path("heard-term").exists()
        assert shell.poll() is None  # it has no handler: any signal would have ended it
    finally:
        process_tree.end(str(folder))
        shell.wait()


def guard(folder: Path, *elsewhere: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", process_tree.__file__, str(folder), "guard", *elsewhere]
    return subprocess.Popen(command, stdin=subprocess.PIPE, cwd="/")


def ignores(pid: int, number: int) -> bool:
    """Return whether a process ignores signal `number`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_the_guard_ends_the_job_when_its_principal_is_gone(folder: Path) -> None:
    mine = folder / "run"
    mine.mkdir()
    shell = start(mine)
    watching = guard(mine, "touch", str(folder / "elsewhere"))
    assert watching.stdin is not None
    wait_for(lambda: ignores(watching.pid, signal.SIGUSR1))  # the last that it sees to
    watching.send_signal(signal.SIGTERM)  # whoever ends everything that has this command's name
    watching.stdin.close()
    assert watching.wait(timeout=30) == 0
    shell.wait(timeout=30)
    assert process_tree.members(str(mine)) == {}
    assert not mine.exists()
    assert (folder / "elsewhere").exists()  # what ends the job on other hosts


def test_another_host_asks_ranks_to_stop_and_ends_them_by_the_jobs_folder(folder: Path) -> None:
    shell = start(folder)
    for task, done in (("stop", lambda: Path("heard-usr1").exists()), ("end", lambda: shell.poll() is not None)):
        subprocess.run([sys.executable, "-I", "-S", process_tree.__file__, str(folder), task], cwd="/", check=True)
        wait_for(done)
    assert process_tree.members(str(folder)) == {}
    assert folder.exists()


def test_a_guard_that_is_dismissed_touches_nothing(folder: Path) -> None:
    shell = start(folder)
    watching = guard(folder, "touch", str(folder / "elsewhere"))
    watching.communicate(process_tree.DONE, timeout=30)
    assert watching.returncode == 0
    assert len(process_tree.members(str(folder))) == 3
    assert not (folder / "elsewhere").exists()
    process_tree.end(str(folder))
    shell.wait()


def test_what_a_launcher_starts_while_it_is_ended_is_ended_too(tmp_path: Path) -> None:
    loop = "while :; do sleep 60 & sleep 0.002; done"
    environment = {**os.environ, process_tree.RUN_DIR: str(tmp_path)}
    process = subprocess.Popen(["/bin/sh", "-c", loop], env=environment, start_new_session=True)
    try:
        until = time.monotonic() + 30
        while len(process_tree.members(str(tmp_path))) < 5:
            assert time.monotonic() < until
        assert process_tree.end(None, below=process.pid)
        process.wait()
        while process_tree.members(str(tmp_path)) and time.monotonic() < until:  # the killed ones take a moment
            time.sleep(0.1)
        assert process_tree.members(str(tmp_path)) == {}
    finally:
        process_tree.end(str(tmp_path))
