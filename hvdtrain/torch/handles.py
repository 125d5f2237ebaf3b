"""A handle on an operation in flight, which may consist of several native ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.torch import engine


class Handle:
    """One operation in flight, of native or other handles; `poll` and `synchronize` take it, and calling it waits too.

    `finish` makes the result of what the parts give; it runs once, in the waiting thread.
    """

    def __init__(self, parts: Sequence[Any], finish: Callable[..., Any], name: str = "") -> None:
        self.name = name
        self._parts = list(parts)
        self._finish = finish
        self._generation = engine.generation()
        self._done = False
        self._result: Any = None

    def poll(self) -> bool:
        """True when `wait` will not block."""
        return self._done or all(poll(part) for part in self._parts)

    def wait(self) -> Any:
        """Block until the operation is done and return its result; later calls return the same."""
        if not self._done:
            if self.is_stale:
                self._done = True
                raise engine.native().HorovodInternalError("This operation was submitted before hvd.shutdown().")
            outputs, errors = [], []
            for part in self._parts:
                try:
                    outputs.append(synchronize(part))
                except Exception as error:  # noqa: BLE001 - wait for the others first, they write into our buffers
                    errors.append(error)
            # Only now: after an interruption, by a signal handler for example, `wait` may be called again.
            self._done = True
            if errors:
                raise errors[0]
            self._result = self._finish(*outputs)
            self._parts = []
        return self._result

    __call__ = wait

    def first(self) -> Handle:
        """Return a handle on the first of this one's results."""
        return Handle([self], lambda results: results[0])

    @property
    def is_stale(self) -> bool:
        """True if Horovod was shut down since: native handles are numbers that may mean something else by now."""
        return self._generation != engine.generation()


def poll(handle: Any) -> bool:
    """Return whether the operation is done, so that `synchronize` will not block."""
    return handle.poll() if isinstance(handle, Handle) else bool(engine.native().poll(handle))


def synchronize(handle: Any) -> Any:
    """Wait for an asynchronous operation and return its result.

    Raises:
        HorovodInternalError: the operation failed, on this rank or on another.
    """
    if callable(handle):
        return handle()
    return engine.native().synchronize(handle)
