"""SIGTERM and SIGUSR1 ask for a stop; a later one does not wait for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hvdtrain.training import preemption

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_for_a_stop_and_the_handlers_come_back(number):
    before = signal.getsignal(number)
    restore = preemption.install()
    try:
        assert preemption.requested() is None
        os.kill(os.getpid(), number)
        assert preemption.requested() == number
    finally:
        restore()
    assert signal.getsignal(number) is before


def test_a_new_fit_was_not_asked(monkeypatch):
    monkeypatch.setattr(preemption, "_requested", signal.SIGTERM)
    preemption.install()()
    assert preemption.requested() is None


def test_what_comes_after_fit_has_looked_last_is_the_scripts(make, monkeypatch):
    torch = pytest.importorskip("torch")
    install, heard = preemption.install, []

    def in_the_last_moment():
        give_back = install()

        def late():
            os.kill(os.getpid(), signal.SIGTERM)
            give_back()

        return late

    monkeypatch.setattr(preemption, "install", in_the_last_moment)
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        history = make().fit((torch.randn(4, 4), torch.zeros(4).long()), progress=False)
        assert (heard, len(history["loss"])) == ([signal.SIGTERM], 1)
        preemption.pass_on()
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_was_to_be_ignored_stays_ignored():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        preemption.install()()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_another_thread_changes_nothing():
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=preemption.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_later_signal_ends_the_process_at_once():
    code = """
import os, signal
from hvdtrain.training import preemption
preemption.install()
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGTERM)  # a scheduler's, of the same moment
print("asked", flush=True)
preemption._at -= 2 * preemption._ONE_REQUEST_S
os.kill(os.getpid(), signal.SIGTERM)
print("still here", flush=True)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30)
    assert (run.stdout, run.returncode) == ("asked\n", 128 + signal.SIGTERM)
