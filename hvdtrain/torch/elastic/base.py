"""What elastic state is: Horovod's own classes, or the same for one process without Horovod."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any


class SoloState:
    """State that can be committed and restored.

    Args:
        bcast_object: not needed alone; taken since Horovod's State has it.
        get_rank: likewise.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Add functions to be called after ranks came or went; alone, that never happens."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: Any) -> None:
        """Do nothing: there are no other hosts."""

    def commit(self) -> None:
        """Save."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: there are no other hosts."""

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank the root's state."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare for other ranks, before `sync`."""


class SoloObjectState(SoloState):
    """State of Python objects, each an attribute; see `SoloState`."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._saved_state = kwargs
        self._set_attrs()
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        """Keep the attributes."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Go back to the attributes kept."""
        self._set_attrs()

    def sync(self) -> None:
        """Take the root's attributes."""
        self._saved_state = self._bcast_object(self._saved_state)
        self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


def solo_run_fn(func: Callable[..., Any], reset: Callable[[], Any]) -> Callable[..., Any]:
    """Return `func`, preceded by `state.sync()`."""

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        state.sync()
        return func(state, *args, **kwargs)

    return wrapper


# Horovod's listen to its driver for hosts that come and go, which only Horovod's run-time knows how to do.
_horovod: Any = None
try:
    _horovod = importlib.import_module("horovod.common.elastic")
except ImportError:
    pass
State: Any = _horovod.State if _horovod else SoloState
ObjectState: Any = _horovod.ObjectState if _horovod else SoloObjectState
run_fn: Any = _horovod.run_fn if _horovod else solo_run_fn
