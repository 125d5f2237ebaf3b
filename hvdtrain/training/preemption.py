"""Orderly stop: SIGTERM or SIGUSR1 requests the end after the current step, a later one ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from hvdtrain.system.process_tree import handles
from hvdtrain.system.settings import EXIT_STOPPED

EXIT_CODE = EXIT_STOPPED

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

# A scheduler that signals every process of a job also signals the launcher, which forwards it: one request.
_ONE_REQUEST_S = 2.0

_requested: signal.Signals | None = None
_at = 0.0


def requested() -> signal.Signals | None:
    """Return the signal that requested a stop; None if none has."""
    return _requested


def install() -> Callable[[], None]:
    """Handle SIGTERM and SIGUSR1; return a function that restores the earlier handlers.

    Only the main thread can handle signals; on another one nothing changes. A signal that the process ignores, or that
    a handler outside of Python handles, stays as it is.
    """
    global _requested
    _requested = None
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before: dict[signal.Signals, Any] = {}
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        # The kernel may know a handler that Python does not: faulthandler's, for example.
        foreign = handler is signal.SIG_DFL and handles(os.getpid(), number)
        if handler not in (signal.SIG_IGN, None) and not foreign:
            before[number] = handler
            signal.signal(number, _ask)

    def restore() -> None:
        for number, handler in before.items():
            if signal.getsignal(number) is _ask:  # the script may have set another since
                signal.signal(number, handler)

    return restore


def pass_on() -> None:
    """Raise a signal again that no step has answered, for the handlers there are now."""
    global _requested
    if _requested is not None:
        number, _requested = _requested, None
        signal.raise_signal(number)


def _ask(number: int, frame: FrameType | None) -> None:
    global _requested, _at
    if _requested is None:
        _requested, _at = signal.Signals(number), time.monotonic()
    elif time.monotonic() - _at > _ONE_REQUEST_S:
        os._exit(128 + number)
