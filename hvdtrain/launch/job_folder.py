"""The private folder of a job: in /dev/shm if there is room, and removed when the job ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

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
    """Make the job's private folder; remove those of jobs that were killed together with their launcher.

    Args:
        ranks: how many share memory through Open MPI; 0 with Gloo.

    Returns:
        The folder, and a message if it is not in /dev/shm, else "". It is there if there is room for ranks' shared
        memory, since Open MPI's segments are in it too; else in $TMPDIR.
    """
    shared = Path(start_checks.SHARED_MEMORY)
    free, wanted = start_checks.free_bytes(), _BYTES + _BYTES_A_RANK * ranks if ranks else _FACTS_BYTES
    why = ""
    if free < wanted:
        why = start_checks.in_words(free) + f", and {ranks} ranks may take {wanted // 2**20 + 1} MiB" * bool(ranks)
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
    """On exit, by an error, a signal or in order, remove the folders that were made inside this context."""
    before = set(_held)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # until the job's supervision handles them
            signal.signal(number, _leave)
    try:
        yield
    finally:
        for path in set(_held) - before:
            remove(path)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _sweep(where: Path) -> None:
    """Remove folders of this user's jobs that have no process left.

    Other users can write to /dev/shm too, so only folders that this user owns are removed.
    """
    with contextlib.suppress(OSError), os.scandir(where) as entries:
        old = [Path(entry.path) for entry in entries if entry.name.startswith(_PREFIX) and _is_old(entry)]
        for path in old:
            with contextlib.suppress(OSError), _opened(path) as folder:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its launcher lives, in any container
                if not process_tree.members(str(path)):
                    shutil.rmtree(path, ignore_errors=True)


def _is_old(entry: os.DirEntry[str]) -> bool:
    found = entry.stat(follow_symlinks=False)
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return mine and time.time() - found.st_mtime > _OLD_S


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)
