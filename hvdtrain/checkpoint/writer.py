"""Write checkpoints behind training: one thread, one write at a time; `wait` raises its error."""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.files import Contents

log = logging.getLogger("hvdtrain")


class Writer:
    """Writes one checkpoint at a time in the background; `wait` raises the error of a failed write.

    Each write starts a thread, which costs a fraction of a millisecond. It is not a daemon, so an interpreter that ends
    waits for the current write. Call all methods from the thread that trains.
    """

    def __init__(self) -> None:
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None

    def submit(
        self, path: str | os.PathLike[str], contents: Contents, *, then: Callable[[], object] | None = None
    ) -> None:
        """Start writing a copy that training does not change, once the one before has ended; then call `then`."""
        self._idle.wait()
        box = [contents]
        try:
            self._idle.clear()
            threading.Thread(target=self._run, args=(box, path, then), name="hvdtrain-checkpoint", daemon=False).start()
        except BaseException:
            # Ctrl-C may come before or after the thread has begun: the one that empties the box ends the work.
            with suppress(IndexError):
                box.pop()
                self._idle.set()
            raise

    def wait(self) -> None:
        """Wait until nothing runs, and raise the error of a write that has failed, once: the first one's."""
        # Not Thread.join: before Python 3.13, one that Ctrl-C interrupts takes the thread for ended ever after.
        self._idle.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, box: list[Contents], path: str | os.PathLike[str], then: Callable[[], object] | None) -> None:
        try:
            contents = box.pop()  # atomic: only one of two threads gets it
        except IndexError:
            return
        try:
            files.write(path, contents)
            if then is not None:
                then()
        except BaseException as error:  # noqa: BLE001 the thread's outermost frame: the caller raises it
            log.error("%s: %s", type(error).__name__, error)
            cause: BaseException | None = error
            while cause is not None:  # release what their frames hold: arrays as large as the model
                traceback.clear_frames(cause.__traceback__)
                cause = cause.__cause__
            self._error = self._error or error
        finally:
            del contents  # else the error's traceback would keep the arrays in memory
            self._idle.set()
