"""Calls that training does not wait for: one thread, in order, until one of them fails."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from hvdtrain.system import redact

log = logging.getLogger("hvdtrain")

_MOST_WAITING = 1000  # calls: more than an hour of intervals


class Background:
    """Makes calls in a separate thread, one after the other, and `release`, with whether all succeeded, in the end.

    The first call that raises causes one warning and is the last call: after a full disk or a lost server, later calls
    would fail too. A call that does not return while a thousand others wait ends it in the same way. Call the methods
    from one thread. `who` is the logger's name, for warnings.
    """

    def __init__(self, who: str, release: Callable[[bool], object]) -> None:
        self._who = who
        self._release = release
        self._failed = threading.Event()
        self._well = False
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(_MOST_WAITING)
        # A daemon: a process that ends does not wait for a server that does not answer.
        self._thread = threading.Thread(target=self._run, name=f"hvdtrain-{who}", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], object]) -> None:
        """Queue `call`. It has no effect after a call has failed."""
        if self._failed.is_set():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail(f"it takes nothing, and {_MOST_WAITING} records wait for it")

    def close(self, *, well: bool, limit_s: float) -> None:
        """Finish the queued calls, call `release`, and wait for both up to `limit_s`; `well`: the run succeeded."""
        self._well = well
        until = time.monotonic() + limit_s
        if not self._failed.is_set():
            with suppress(queue.Full):
                self._calls.put(None, timeout=limit_s)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive() and not self._failed.is_set():
            self._fail(f"it did not end within {limit_s:g} s; the last records may be missing")

    def _run(self) -> None:
        while not self._failed.is_set() and (call := self._calls.get()) is not None:
            self._try(call)
        self._try(lambda: self._release(self._well and not self._failed.is_set()))

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as problem:  # noqa: BLE001 - another package's error: training continues
            self._fail(problem)

    def _fail(self, why: object) -> None:
        if not self._failed.is_set():
            self._failed.set()
            give_up(self._who, why)


def give_up(who: str, why: object) -> None:
    """Warn that a logger stops before its run ends."""
    what = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
    # A server's address may contain a password.
    log.warning("%s logs nothing more, and training continues without it: %s", who, redact.text(str(what)))
