"""Nothing hangs: a rank that waits for others too long says so and ends, and a rank that fails says it first.

    HVDTRAIN_STALL_S   seconds a rank may wait for others; 600 by default, 0 for ever
    HVDTRAIN_DEBUG=1   every rank prints its whole traceback, also where another rank's end is the cause

A daemon thread looks about once a second at what this process waits for. Steps pay nothing but a counter.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import NoReturn

from hvdtrain.distributed import launch_environment
from hvdtrain.distributed.watchdog import rank_exit, step_count
from hvdtrain.distributed.watchdog.rank_exit import STALLED
from hvdtrain.distributed.watchdog.step_count import step_done
from hvdtrain.distributed.watchdog.thread import Watch
from hvdtrain.distributed.watchdog.waits import note_device

__all__ = [
    "LIMIT", "STALLED", "begin", "horovods_limits", "joined", "leave", "limit_s", "note_device", "step_count",
    "step_done",
]  # fmt: skip

LIMIT = "HVDTRAIN_STALL_S"
_DEFAULT_S = 600.0

_watch: Watch | None = None


def limit_s() -> float:
    """Return how long a rank may wait for others, in seconds; infinite where HVDTRAIN_STALL_S is 0.

    Raises:
        ValueError: HVDTRAIN_STALL_S is not a number >= 0.
    """
    value = os.environ.get(LIMIT, "")
    try:
        limit = float(value) if value else _DEFAULT_S
    except ValueError:
        limit = -1.0
    if not limit >= 0:
        raise ValueError(f"{LIMIT} must be a number of seconds, 0 for no limit. Received: {LIMIT}={value!r}")
    return limit or float("inf")


def horovods_limits() -> dict[str, str]:
    """Return settings with which Horovod names stalled tensors before our limit, and ends what we do not see after it.

    Horovod checks tensors every HOROVOD_STALL_CHECK_TIME_SECONDS. For tensors in its cache it restarts its count after
    they have waited that long once. So it reports a stall within three times this time.
    """
    limit = limit_s()
    if limit == float("inf"):
        return {}
    check = max(1, min(60, int(limit / 4)))
    own = os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "")
    if own.isdecimal() and int(own):
        check = min(check, int(own))  # Horovod would not end anything that it does not warn of before
    return {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(check),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(int(limit) + check),
    }


def begin() -> None:
    """Watch this process from here on, before Horovod starts: ranks wait for each other there too."""
    global _watch
    found = launch_environment.detect()
    if _watch is None and found is not None and found.size != 1:
        _watch = Watch(limit_s())


def leave(code: int) -> NoReturn:
    """End this process at once with `code`, as one that failed: other ranks are told of it, not waited for."""
    if _watch is not None:
        _watch.leave(code)
    rank_exit.leave(code)


def joined(module: ModuleType) -> None:
    """Take over the end of this process, now that Horovod knows its rank; one rank alone is left alone.

    Args:
        module: `horovod.torch` or `horovod.tensorflow`, initialised.
    """
    global _watch
    if module.size() == 1:
        if _watch is not None:
            _watch.stop()
            _watch = None
        return
    if _watch is None:
        _watch = Watch(limit_s())
    _watch.joined(module)
