"""A folder of checkpoints has one writer: whom it refuses, for whom it waits, and when it is free again."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from hvdtrain.checkpoint import lock as checkpoint_lock
from hvdtrain.checkpoint.lock import NAME, FolderLock, Holder
from hvdtrain.errors import CheckpointError, FolderInUseError


def acquire(folder, *, own=(), limit_s=0.0, **here):
    lock = FolderLock(folder)
    holder = Holder("mine", "train", None, **here)
    lock.acquire(holder, is_own=lambda other: other.run in own or other.job in own, limit_s=limit_s)
    return lock


@pytest.fixture
def other(tmp_path):
    """Start a process that holds `tmp_path` and then does what it is given; return it."""
    started = []

    def start(then):
        script = """
            import os, sys, time
            from pathlib import Path
            from hvdtrain.checkpoint.lock import FolderLock, Holder
            lock = FolderLock(Path(sys.argv[1]))
            lock.acquire(Holder("theirs", "train", "job-1"), is_own=lambda _: False, limit_s=0)
        """
        lines = textwrap.dedent(script) + "print('held', flush=True)\n" + textwrap.dedent(then)
        process = subprocess.Popen([sys.executable, "-c", lines, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_another_process_is_refused_at_once_with_the_name_of_the_holder(tmp_path, other):
    process = other("time.sleep(60)")
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match=rf"Run train \(theirs\), process {process.pid} on host .* since 20") as e:
        acquire(tmp_path, limit_s=60)
    assert time.monotonic() - begin < 5
    for help_ in (f"kill {process.pid}", 'resume="never"', str(tmp_path), "a folder of its own"):
        assert help_ in str(e.value)


def test_a_dead_holder_frees_the_folder(tmp_path, other):
    process = other("time.sleep(60)")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / NAME).exists()
    lock = acquire(tmp_path)
    assert '"run": "mine"' in (tmp_path / NAME).read_text()
    lock.release()
    assert not (tmp_path / NAME).exists()


def test_a_fork_that_outlives_the_holder_does_not_keep_the_folder(tmp_path, other):
    process = other("if os.fork() == 0: print(os.getpid(), flush=True)\ntime.sleep(60)")
    child = int(process.stdout.readline())
    try:
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.kill(child, 0)
        acquire(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("own", ["theirs", "job-1"])
def test_an_earlier_start_of_the_same_run_is_waited_for(tmp_path, other, own, caplog):
    caplog.set_level("INFO", logger="hvdtrain")
    process = other("time.sleep(1)")
    acquire(tmp_path, own=[own], limit_s=60).release()
    assert process.wait(10) == 0
    assert caplog.text.count(f"waiting for process {process.pid}") == 1


def test_a_holder_on_another_host_may_be_lost_and_is_waited_for(tmp_path, other):
    other("time.sleep(1)")
    with pytest.raises(CheckpointError, match="if that host is lost"):
        acquire(tmp_path, limit_s=0.1, host="elsewhere")
    acquire(tmp_path, limit_s=60, host="elsewhere").release()


def test_a_dead_users_file_that_cannot_be_written_is_replaced(tmp_path, monkeypatch):
    (tmp_path / NAME).write_text("theirs")
    open_ = os.open

    def forbidden(path, flags, *mode):  # as another user's file of mode 0644
        if flags & os.O_RDWR and path.exists() and path.read_text() == "theirs":
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_(path, flags, *mode)

    monkeypatch.setattr(checkpoint_lock.os, "open", forbidden)
    lock = acquire(tmp_path)
    assert '"run": "mine"' in (tmp_path / NAME).read_text()
    lock.release()


def test_a_file_that_changes_all_the_time_is_given_up_with_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint_lock, "_is_at", lambda descriptor, path: False)
    acquire(tmp_path).release()
    assert caplog.text.count("Make sure that no other run writes to it") == 1


def test_a_later_versions_holder_may_say_more(tmp_path, other):
    line = "import json; path = Path(sys.argv[1], '.lock'); found = json.loads(path.read_text()); "
    process = other(
        line + "path.write_text(json.dumps({**found, 'more': 1})); print('more', flush=True); time.sleep(60)"
    )
    assert process.stdout.readline() == "more\n"
    with pytest.raises(FolderInUseError, match=rf"process {process.pid} on host"):  # no restart of `hvdtrain run`
        acquire(tmp_path)


def test_an_earlier_start_that_does_not_end_is_refused(tmp_path, other):
    other("time.sleep(60)")
    with pytest.raises(CheckpointError, match="has one writer") as raised:
        acquire(tmp_path, own=["theirs"], limit_s=0.5)
    assert raised.type is CheckpointError  # `hvdtrain run` may try again


def test_several_locks_of_one_process_hold_the_folder_until_the_last_is_released(tmp_path):
    first, second = acquire(tmp_path), acquire(tmp_path / "." / "")
    first.release()
    first.release()
    assert (tmp_path / NAME).exists()
    second.release()
    assert not (tmp_path / NAME).exists()


def test_a_filesystem_without_locks_is_said_and_no_obstacle(tmp_path, monkeypatch, caplog):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    acquire(tmp_path).release()
    assert caplog.text.count("no file locks (No locks available). Make sure that no other run writes to it") == 1


def test_a_folder_that_cannot_be_written_is_not_held_and_no_error_here(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    acquire(tmp_path / "file" / "runs").release()


def test_a_file_that_says_nothing_is_still_a_lock(tmp_path, other):
    process = other("open(os.path.join(sys.argv[1], '.lock'), 'w').close(); print('empty', flush=True); time.sleep(60)")
    assert process.stdout.readline() == "empty\n"
    with pytest.raises(CheckpointError, match="Another process writes checkpoints to"):
        acquire(tmp_path, own=["theirs"], limit_s=60)


def test_a_file_that_its_holder_removed_meanwhile_is_not_the_folders_lock(tmp_path, monkeypatch):
    opened = []

    def late(path):
        opened.append(os.open(path, os.O_RDWR | os.O_CREAT))
        if len(opened) == 1:
            path.unlink()  # between open and flock here, the holder releases it
        return opened[-1], True

    monkeypatch.setattr(checkpoint_lock, "_opened", late)
    lock = acquire(tmp_path)
    assert len(opened) == 2
    assert (tmp_path / NAME).stat().st_ino == os.fstat(opened[1]).st_ino
    lock.release()
