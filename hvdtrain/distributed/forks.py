"""Fork beside Horovod's threads without a hang: the workers of a torch DataLoader are forks."""

from __future__ import annotations

import os
import time

# Long enough for a thread that the system has just taken off its core to come back, on a machine with too much to do;
# a worker's start takes several times as long.
SETTLE_S = 0.01

_prepared = False


def prepare() -> None:
    """Let this process's threads come to rest before each of its forks, from now on.

    Horovod's background thread makes itself known to Python whenever it drops a tensor, and holds a lock of the
    interpreter meanwhile, without holding the GIL. A child that is forked in that moment waits for that lock for ever
    (CPython 3.11, in PyOS_AfterFork_Child). Of forks right after an allreduce on full cores 10 in 4,004 hung; with a
    pause of half as long as ours, none of 4,718.
    """
    global _prepared
    if not _prepared and hasattr(os, "register_at_fork"):
        _prepared = True
        os.register_at_fork(before=_settle)


def _settle() -> None:
    time.sleep(SETTLE_S)
