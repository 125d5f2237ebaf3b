"""Writing behind training: one at a time, no failure lost, and none cut short by an exit or Ctrl-C."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from hvdtrain.checkpoint import Contents, Writer, files, read
from hvdtrain.errors import CheckpointError


def contents(number=0):
    return Contents({"model": {"w": np.full(3, number)}}, {"number": number})


@pytest.fixture
def gate(monkeypatch):
    """Hold every write back until the gate is opened; gate.running counts those under way."""
    gate = threading.Event()
    gate.running, gate.most = 0, 0
    real = files.write

    def held(path, contents):
        gate.running += 1
        gate.most = max(gate.most, gate.running)
        assert gate.wait(30)
        real(path, contents)
        gate.running -= 1

    monkeypatch.setattr(files, "write", held)
    yield gate
    gate.set()


def test_submit_returns_before_the_write_and_wait_after_it(tmp_path, gate):
    writer = Writer()
    done = []
    writer.submit(tmp_path / "one", contents(), then=lambda: done.append(read(tmp_path / "one").meta))
    assert not (tmp_path / "one").exists()
    gate.set()
    writer.wait()
    assert done == [{"number": 0}]


def test_only_one_write_is_in_flight(tmp_path, gate):
    writer = Writer()
    writer.submit(tmp_path / "one", contents())
    threading.Timer(0.2, gate.set).start()
    started = time.perf_counter()
    writer.submit(tmp_path / "two", contents())
    assert time.perf_counter() - started > 0.15
    writer.wait()
    assert gate.most == 1
    assert read(tmp_path / "two").meta == {"number": 0}


def test_a_failure_is_raised_once_on_the_callers_thread_and_the_writer_continues(tmp_path, caplog):
    writer = Writer()
    (tmp_path / "file").write_text("mine")
    for name in ("file", "file/deeper", "one"):
        writer.submit(tmp_path / name, contents(1))
    with pytest.raises(CheckpointError, match="a file is in its place"):
        writer.wait()
    assert "deeper was not written" in caplog.text  # the second is told too
    writer.wait()
    assert read(tmp_path / "one").meta == {"number": 1}


def test_a_failure_does_not_keep_the_arrays_in_memory(tmp_path):
    (tmp_path / "file").write_text("mine")
    writer = Writer()
    array = np.ones(3)
    gone = weakref.ref(array)
    writer.submit(tmp_path / "file", Contents({"model": {"w": array}}, {}))
    del array
    writer._idle.wait()
    gc.collect()
    assert gone() is None
    with pytest.raises(CheckpointError):
        writer.wait()


def test_a_writer_that_gets_no_thread_says_so_and_does_not_hang(tmp_path, monkeypatch):
    def none_left(thread):
        raise RuntimeError("can't start new thread")

    writer = Writer()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="new thread"):
            writer.submit(tmp_path / "one", contents())
    writer.submit(tmp_path / "one", contents())
    writer.wait()
    assert read(tmp_path / "one").meta == {"number": 0}


def test_ctrl_c_in_wait_leaves_the_write_whole_and_waited_for(tmp_path, gate):
    writer = Writer()
    writer.submit(tmp_path / "one", contents())
    for _ in range(2):  # Thread.join takes the thread for ended after the first
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            writer.wait()
    threading.Timer(0.1, gate.set).start()
    writer.wait()
    assert read(tmp_path / "one").meta == {"number": 0}


def test_ctrl_c_while_the_thread_starts_neither_hangs_nor_lets_two_write_at_once(tmp_path, gate, monkeypatch):
    real = threading.Thread.start

    def start(thread):
        real(thread)
        raise KeyboardInterrupt

    writer = Writer()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            writer.submit(tmp_path / "one", contents())
    threading.Timer(0.1, gate.set).start()
    writer.submit(tmp_path / "two", contents(2))
    writer.wait()
    assert gate.most == 1
    assert read(tmp_path / "two").meta == {"number": 2}


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "raise ValueError('x')"])
def test_an_interpreter_that_ends_finishes_the_write(tmp_path, end):
    script = f"""
import sys, time
import numpy as np
from hvdtrain.checkpoint import Contents, Writer, files
real = files.write
def slow(path, contents):
    time.sleep(0.5)
    real(path, contents)
files.write = slow
Writer().submit({str(tmp_path / "one")!r}, Contents({{"model": {{"w": np.ones(1000)}}}}, {{"number": 1}}))
{end}
"""
    subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True)
    assert read(tmp_path / "one").meta == {"number": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
