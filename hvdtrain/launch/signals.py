"""Signals as a list of requests, and a wait that they end."""

from __future__ import annotations

import os
import select
import signal
import time
from types import FrameType, TracebackType

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Signals:
    """While it is entered, requests to stop are collected instead of obeyed, and ended children end a wait.

    Afterwards requests are ignored: how the job ended is settled, and only this process's exit status tells it.
    """

    def __init__(self) -> None:
        self.requests: list[signal.Signals] = []

    def __enter__(self) -> Signals:
        """Take the signals over."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for each in REQUESTS:
            if signal.getsignal(each) is not signal.SIG_IGN:  # nohup's choice
                signal.signal(each, self._take)
        self._child_before = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hear no more."""
        for each in REQUESTS:
            signal.signal(each, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, self._child_before)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def wait(self, seconds: float) -> None:
        """Wait for a signal, or so long."""
        deadline = time.monotonic() + seconds
        ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
        if ready:
            try:
                while os.read(self._read, 512):
                    pass
            except BlockingIOError:
                pass

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.requests.append(signal.Signals(number))
