"""Waits that the watchdog reads from stacks; a few lines stand for Horovod."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.distributed.watchdog import tracebacks, waits

# Files and functions named like Horovod's, in which a thread waits until it is let go.
SYNCHRONIZE = """
def synchronize(handle):
    with gate:
        pass
"""
REDUCE = """
def grouped_allreduce(tensors, name):
    return synchronize(7)
class Unit:
    names = ["a", "b", "c", "d", "e"]
    def finish(self):
        synchronize(8)
"""


def closed():
    """Return a lock that is taken: to wait for it is one native call, as Horovod's are."""
    gate = threading.Lock()
    gate.acquire()
    return gate


def open_(gate):
    if gate.locked():
        gate.release()


@pytest.fixture
def horovod():
    """Return a namespace of such functions; whoever waits in them is let go at the end."""
    space = {"gate": closed()}
    exec(compile(SYNCHRONIZE, "/x/site-packages/horovod/torch/mpi_ops.py", "exec"), space)  # noqa: S102
    inside = str(Path(tracebacks.PACKAGE) / "torch/ops/reduce_ops.py")
    exec(compile(REDUCE, inside, "exec"), space)  # noqa: S102
    yield space
    open_(space["gate"])


def waiting(function, *args):
    """Run `function` on a thread; return the thread once it waits, and what is found of it."""
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    until = time.monotonic() + 30
    while time.monotonic() < until:
        found = [wait for wait in waits.find() if wait.thread == thread.ident]
        if found:
            return found[0]
    raise AssertionError("the wait was not found")


def test_a_wait_is_the_same_wait_until_it_ends(horovod):
    first = waiting(horovod["synchronize"], 3)
    again = next(wait for wait in waits.find() if wait.thread == first.thread)
    other = waiting(horovod["synchronize"], 4)
    assert (first.kind, first.key == again.key, first.key == other.key) == ("collective", True, False)
    open_(horovod["gate"])
    until = time.monotonic() + 30
    while {first.key, other.key} & {wait.key for wait in waits.find()}:
        assert time.monotonic() < until


@pytest.mark.parametrize("collects", [True, False])
def test_stacks_are_read_without_collecting_garbage(monkeypatch, collects):
    """Else a process with tensors in its garbage may hang on Python 3.11: see `frames`."""
    seen = []
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or {})
    if not collects:
        gc.disable()
    try:
        waits.find()
        waits.stacks()
        assert (seen, gc.isenabled()) == ([False, False], collects)
    finally:
        gc.enable()


def test_a_wait_names_the_collective_and_the_tensors(horovod):
    assert waiting(horovod["grouped_allreduce"], [], "loss").what == "allreduce of 'loss'"
    assert waiting(horovod["Unit"]().finish).what == "allreduce of 'a', 'b', 'c' and 2 more"


def test_a_thread_that_computes_does_not_wait(horovod):
    assert not [wait for wait in waits.find() if wait.thread == threading.get_ident()]


def test_a_graph_waits_between_its_two_counters(monkeypatch):
    counts = [4, 4]
    monkeypatch.setattr(waits, "_graphs", {})
    monkeypatch.setattr(waits, "_steps", 0)
    monkeypatch.setattr(waits, "_given", False)
    waits.note_graph(["kernel"], lambda: (counts[0], counts[1]))
    space = {"gate": closed(), "entered": []}
    code = "def quick_execute():\n    entered.append(1)\n    with gate:\n        pass\n"
    exec(compile(code, "/x/tensorflow/python/eager/execute.py", "exec"), space)  # noqa: S102
    thread = threading.Thread(target=space["quick_execute"], daemon=True)
    thread.start()
    while not space["entered"]:
        time.sleep(0.01)
    assert not [wait for wait in waits.find() if wait.thread == thread.ident]
    counts[0] = 5
    found = [wait for wait in waits.find() if wait.thread == thread.ident]
    open_(space["gate"])
    assert [(wait.kind, wait.what) for wait in found] == [("graph", "the reduction of 'kernel'")]
    assert waits.steps_done() == 4


def test_the_oldest_step_that_a_gpu_has_not_come_by_is_one_wait(monkeypatch):
    monkeypatch.setattr(waits, "_device", (0, lambda: True))
    passed = {"a": False, "b": False}

    def found():  # threads that other tests let go may still be on their way
        return [wait for wait in waits.find() if wait.kind == "device"]

    waits.note_device(lambda: passed["a"])
    (first,) = found()
    waits.note_device(lambda: passed["b"])  # later ones cannot have come by
    assert [wait.key for wait in found()] == [first.key]
    assert first.what == "a step's reductions on the GPU"
    passed["a"] = True
    assert found() == []
    waits.note_device(lambda: passed["b"])
    assert [wait.key for wait in found()] not in ([], [first.key])
    passed["b"] = True
    waits.note_device(lambda: 1 / 0)
    assert found() == []  # the device's error is for whoever trains


def test_a_thread_that_always_waits_counts_only_while_the_process_waits_for_its_step(monkeypatch):
    monkeypatch.setattr(waits, "_step", None)
    steps = iter([None, 7, 7, 8])
    waits.note_step(threading.get_ident(), lambda: next(steps))
    keys = [[wait.key for wait in waits.find() if wait.kind == "step"] for _ in range(4)]
    assert keys == [[], [("step", 7)], [("step", 7)], [("step", 8)]]
    waits.forget_step(threading.get_ident() + 1)  # another thread's
    assert waits._step is not None
    waits.forget_step(threading.get_ident())
    assert waits._step is None


def test_the_place_is_the_users_and_not_a_librarys():
    def here():
        return json.loads("1", parse_int=lambda _: waits.place(sys._getframe()))

    assert here().startswith("test_waits.py:")
    assert here().endswith(" in here") is False  # the lambda's own line
