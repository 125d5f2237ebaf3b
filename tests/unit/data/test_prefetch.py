"""Batches of arrays that a thread gathers before they are asked for."""

from __future__ import annotations

import gc
import threading
import time
import traceback

import numpy as np
import pytest
from late_device import prefetch_threads, until

from hvdtrain.data.prefetch import Prefetch

X, Y = np.arange(40.0).reshape(20, 2), np.arange(20)
ROWS = [np.arange(first, first + 2) for first in range(0, 20, 2)]


class Memory:
    """Plain memory; `gate` lets so many batches be gathered, `fails` is the one that cannot be."""

    def __init__(self, *, gate=99, fails=None):
        self.gate, self.fails = threading.Semaphore(gate), fails
        self.placed, self.filled, self.copied, self.threads = 0, 0, [], set()

    def place(self, array, rows):
        self.placed += array is X
        return np.full((rows, *array.shape[1:]), -1, array.dtype)

    def fill(self, place, array, rows):
        self.threads.add(threading.current_thread().name)
        if array is X:
            assert self.gate.acquire(timeout=20)
            if rows[0] == self.fails:
                raise OSError("cannot be read")
        place[...] = array[rows]
        self.filled += array is Y

    def copy_ahead(self, places):
        assert (places[0] >= 0).all(), "copied before it is gathered"
        self.copied.append(int(places[1][0]))


def read(memory, **options):
    return Prefetch(memory, **options).read([X, Y], ((int(rows[0]), rows) for rows in ROWS))


def values(batch):
    tag, (x, y) = batch
    return tag, x.tolist(), y.tolist()


EXPECTED = [(int(rows[0]), X[rows].tolist(), Y[rows].tolist()) for rows in ROWS]


@pytest.mark.parametrize("options", [{}, {"copies": True}, {"step": 3}, {"step": 30}])
def test_batches_are_those_that_were_asked_for_in_order(options):
    memory = Memory()
    assert [values(batch) for batch in read(memory, **options)] == EXPECTED
    assert memory.placed == len(ROWS)
    assert all(name.startswith("hvdtrain-prefetch") for name in memory.threads)
    assert not prefetch_threads()


@pytest.mark.parametrize(("options", "ahead"), [({}, 1), ({"copies": True}, 2), ({"step": 3}, 3)])
def test_the_next_batches_and_no_more_are_gathered_meanwhile(options, ahead):
    memory = Memory()
    batches = read(memory, **options)
    for number in range(3):
        assert values(next(batches)) == EXPECTED[number]
        until(lambda n=number: memory.filled == n + 1 + ahead)
        time.sleep(0.02)
        assert memory.filled == memory.placed == number + 1 + ahead


def test_one_batch_is_copied_ahead_once_it_is_gathered():
    memory = Memory(gate=1)
    batches = read(memory, copies=True)
    next(batches)
    assert memory.copied == [0]  # the second one is not gathered
    memory.gate.release(2)
    until(lambda: memory.filled == 3)
    next(batches)
    assert memory.copied == [0, 2, 4]


def test_a_batch_that_is_not_gathered_is_waited_for():
    memory = Memory(gate=0)
    batches = read(memory)
    threading.Timer(0.1, memory.gate.release, [99]).start()
    assert values(next(batches)) == EXPECTED[0]


@pytest.mark.parametrize("copies", [False, True])
def test_an_error_comes_with_its_batch_and_ends_the_thread(copies):
    memory = Memory(fails=6)
    batches = read(memory, copies=copies)
    for number in range(3):
        assert values(next(batches)) == EXPECTED[number]
        until(lambda n=number: memory.filled == min(3, n + 2 + copies))
    with pytest.raises(OSError, match="cannot be read") as caught:
        next(batches)
    assert "in fill" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert not prefetch_threads()
    assert next(batches, None) is None


def test_the_thread_ends_when_the_batches_are_closed_or_dropped():
    closed = read(Memory())
    next(closed)
    assert len(prefetch_threads()) == 1
    closed.close()
    assert not prefetch_threads()
    dropped = read(Memory())
    next(dropped)
    del dropped
    gc.collect()
    assert not prefetch_threads()
    read(Memory())  # has not begun
    assert not prefetch_threads()


def test_ending_gathers_nothing_more():
    memory = Memory(gate=2)
    batches = read(memory, step=5)
    next(batches)
    until(lambda: memory.filled == 2)  # the third one is being gathered, three more wait
    threading.Timer(0.1, memory.gate.release, [99]).start()
    batches.close()
    assert memory.filled <= 3
