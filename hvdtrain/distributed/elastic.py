"""Elastic jobs, for every framework: continue when ranks leave or join.

Horovod's driver starts ranks on new hosts, drops hosts whose ranks died, and notifies rank 0. The others synchronize,
restore their last commit and continue from there.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import importlib
import logging
import queue
from collections.abc import Callable, Iterable
from typing import Any

from hvdtrain.distributed.shard_commits import ShardCommits
from hvdtrain.distributed.watchdog.rank_exit import is_caused_by_others

log = logging.getLogger("hvdtrain")

_TRIES = 20
_INIT_FAILED = "Horovod initialization failed"
_NOT_A_FAILURE = "Mismatched"  # a user's error, which would occur again in every new round


class _SoloState:
    """Horovod's State without Horovod: no rank joins or leaves, and `save`, `restore` and `sync` are the user's."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        self._reset_callbacks.extend(callbacks)

    def commit(self) -> None:
        self.save()
        self.check_host_updates()

    def check_host_updates(self, *_: Any) -> None: ...

    def save(self) -> None:
        raise NotImplementedError

    restore = sync = save
    reset = on_hosts_updated = check_host_updates


# Horovod's State is notified by its driver of hosts that join and leave.
try:
    _horovod: Any = importlib.import_module("horovod.common.elastic")
except ImportError:
    _horovod = None
_State: Any = _horovod.State if _horovod else _SoloState


class State(_State):
    """State that can be committed and restored, and is notified of hosts that join and leave; see `run_fn`."""

    def on_reset(self) -> None:
        """Call the callbacks. Horovod's also forgets hosts that joined while ranks synchronized."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()


class ObjectState(State):
    """State of Python objects, each an attribute, of which a commit saves copies.

    Unlike Horovod's, it restores objects changed in place too, and `sync` sends the present attributes.
    """

    _parts: Iterable[Any] = ()  # what has save, restore, sync and reset of its own

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._saved_state = copy.deepcopy(kwargs)  # its keys are the attributes' names
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)
        self._set(kwargs)

    def save(self) -> None:
        """Save copies of everything in memory."""
        for part in self._parts:
            part.save()
        self._saved_state = copy.deepcopy(self._attributes())

    def restore(self) -> None:
        """Restore the copies."""
        for part in self._parts:
            part.restore()
        self._set(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Take the root's state, and save copies of it."""
        for part in self._parts:
            part.sync()
        if self._saved_state:
            self._set(self._bcast_object(self._attributes()))
        ObjectState.save(self)

    def reset(self) -> None:
        """Prepare the parts for other ranks."""
        for part in self._parts:
            part.reset()

    def _attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class ShardedObjectState(ObjectState):
    """An `ObjectState`, in which the state of optimizers may be in shards.

    Then `save`, `commit` and `sync` are collectives: each rank keeps its parts, and a copy of those of a rank on
    another host. `sync` raises LostShardError, on every rank, if no rank has a part.

    Args:
        shards: the commits of the shards.
        kwargs: as of `ObjectState`.
    """

    _must_load = True  # shards of the last commit count: ranks have changed, or this one is new

    def __init__(self, shards: ShardCommits, **kwargs: Any) -> None:
        self._shards = shards
        super().__init__(**kwargs)

    def save(self) -> None:
        """Save copies of everything in memory."""
        self._shards.prepare()
        super().save()
        self._shards.confirm()

    def restore(self) -> None:
        """Restore the copies."""
        super().restore()
        self._shards.restore()

    def sync(self) -> None:
        """Take the root's state, and save copies of it."""
        self._shards.load(wanted=self._must_load)
        self._must_load = False
        super().sync()
        self._shards.prepare()
        self._shards.confirm()

    def reset(self) -> None:
        """Prepare for other ranks."""
        super().reset()
        self._must_load = True

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if hosts have changed; see Horovod's."""
        try:
            super().check_host_updates()
        except Exception as interrupt:
            if self._shards.are_there and type(interrupt).__name__ == "HostsUpdatedInterrupt":
                self.save()  # ranks that leave have shards
                interrupt.skip_sync = False  # type: ignore[attr-defined]
            raise


def run_fn(func: Callable[..., Any], reset: Callable[[], Any]) -> Callable[..., Any]:
    """Return `func(state, ...)`, which begins again whenever ranks join, leave or die.

    Before each beginning the state is synchronized from rank 0; after a failure the last commit is restored first.
    `reset` lets this process leave the previous ranks and join the present ones.
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        if not _horovod:
            state.sync()
            return func(state, *args, **kwargs)
        manager = _horovod.notification_manager
        manager.init()
        manager.register_listener(state)
        in_sync = False
        try:
            while True:
                try:
                    if not in_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except Exception as error:
                    if type(error).__name__ == "HostsUpdatedInterrupt":
                        in_sync = bool(getattr(error, "skip_sync", False))
                        log.info("hosts have changed: ranks synchronize")
                    elif is_failure_of_others(error):
                        state.restore()
                        in_sync = False
                        log.warning("a rank failed (%s): the others return to their last commit", _first_line(error))
                    else:
                        raise
                # Before they synchronize: a host that joins meanwhile may be reported too late.
                state._host_messages = queue.Queue()
                _join_ranks(reset)
                state.on_reset()
        finally:
            manager.remove_listener(state)

    return wrapper


def _join_ranks(reset: Callable[[], Any]) -> None:
    """Join the present ranks; try again where some of them die first. A host that left the job ends: SystemExit."""
    for tries_left in reversed(range(_TRIES)):
        try:
            reset()
            break
        except Exception as error:
            if _is_removed():
                log.warning("this host was removed from the job: its rank ends")
                raise SystemExit(0) from None
            if not tries_left or not (is_failure_of_others(error) or _INIT_FAILED in str(error)):
                raise
            log.warning("ranks could not synchronize (%s): trying again", _first_line(error))


def _is_removed() -> bool:
    getenv = ctypes.CDLL(None).getenv  # where Horovod has set it, which Python's own environment does not see
    getenv.restype = ctypes.c_char_p
    return bool(getenv(b"HOROVOD_RANK") == b"-1")


def is_failure_of_others(error: BaseException) -> bool:
    """Return whether an exception, Horovod's or a quote of it, says that ranks no longer reach each other."""
    is_horovods = type(error).__name__ == "HorovodInternalError" and _NOT_A_FAILURE not in str(error)
    return is_horovods or is_caused_by_others(error)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "Horovod" in line), lines[0])[:200]
