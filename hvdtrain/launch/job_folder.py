"""The private folder of a job: in /dev/shm if there is room, and removed when the job ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.distributed.launch_environment import count_ranks
from hvdtrain.errors import UsageError
from hvdtrain.horovod_build.shared import start_checks
from hvdtrain.system import process_tree

_PREFIX = "hvdtrain-run-"
# For PMIx's tables, for Open MPI's check for room before it makes a rank's segment, and for a segment in use.
_BYTES, _BYTES_A_RANK = 14 * 2**20, 2**19
_FACTS_BYTES = 2**18  # what ranks write about themselves
_OLD_S = 3600.0  # the folder of a running job changes with every step

_held: dict[Path, int] = {}


def make(ranks: int) -> tuple[Path, str]:
    """Make the folder of a job with `ranks` over MPI, 0 with Gloo; return it, and why it is not in /dev/shm or ""."""
    shared = Path(start_checks.SHARED_MEMORY)
    free, wanted = start_checks.free_bytes(), _BYTES + _BYTES_A_RANK * ranks if ranks else _FACTS_BYTES
    why = ""
    if free < wanted:
        need = f", and {count_ranks(ranks)} may take {wanted // 2**20 + 1} MiB" if ranks else ""
        why = start_checks.in_words(free) + need
    where = Path(tempfile.gettempdir()) if why else shared
    _sweep(shared)
    try:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
        _held[path] = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(_held[path], fcntl.LOCK_SH)
    except OSError as problem:
        raise UsageError(
            f"no folder for the job can be made in {where}: {problem.strerror}{'; ' * bool(why)}{why}. Make room, or "
            "set TMPDIR to another folder. In a container: docker run --shm-size=1g"
        ) from None
    return path, f"{why}: using {path} instead. In a container: docker run --shm-size=1g" if why else ""


def remove(path: Path) -> None:
    """Remove a job's folder."""
    shutil.rmtree(path, ignore_errors=True)
    if path in _held:
        os.close(_held.pop(path))


@contextlib.contextmanager
def removed_at_the_end() -> Iterator[None]:
    """On exit, by an error, a signal or in order, remove every job folder that this process holds."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # until the job's supervision handles them
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for path in [*_held]:
            remove(path)


def _sweep(where: Path) -> None:
    """Remove old folders of this user's jobs that have no process left; other users can write to /dev/shm too."""
    for path in where.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, folder)
            found = os.fstat(folder)
            if found.st_uid != os.geteuid() or time.time() - found.st_mtime <= _OLD_S:
                continue
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its launcher lives, in any container
            if not process_tree.members(str(path)):
                shutil.rmtree(path, ignore_errors=True)
