"""Folders that are written and removed atomically, and the leftovers of killed processes.

After a kill at any moment, a folder is complete under its name or its `aside` name, or it has a temporary name, which
no checkpoint has. A temporary folder is locked while its process works in it. The kernel releases the lock when the
process dies. So leftovers can be distinguished from files of a live process.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvdtrain.system import private_files

log = logging.getLogger("hvdtrain")

_STARTED = time.time()
_HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
_TEMPORARY = re.compile(r"\.(?P<target>.+)\.(?P<host>[0-9a-f]{8})-[0-9a-f]{12}")
_ASIDE = re.compile(r"\.(?P<target>.+)\.replaced")


def locate(target: Path) -> Path:
    """Return where the folder is: under its aside name if its writer was killed just before it put the new one."""
    return target if os.path.lexists(target) or not _aside(target).is_dir() else _aside(target)


def target_of(path: Path) -> Path:
    """Return the folder whose aside name `path` is, else `path` itself."""
    match = _ASIDE.fullmatch(path.name)
    return path.with_name(match["target"]) if match else path


@contextmanager
def opened(path: str | Path, flags: int = os.O_DIRECTORY, folder: int | None = None) -> Iterator[int]:
    """Open a folder, or what is in an open one, for reading."""
    descriptor = os.open(path, os.O_RDONLY | flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def temporary(target: Path) -> Iterator[Path]:
    """Make a locked, empty folder beside `target`, and remove what is left of it in the end."""
    path = _temporary_name(target)
    private_files.make_folder(path, exist_ok=False)
    with opened(path) as descriptor:
        try:
            _try_lock(descriptor)
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def put(source: Path, target: Path) -> None:
    """Rename a complete folder to `target`, instead of the folder that may be there."""
    sync(source)
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        # A folder cannot be renamed over one that holds files, so for a moment there is only the aside name.
        if _aside(target).is_dir():  # of an earlier kill; `target` is whole
            remove(_aside(target))
        os.rename(target, _aside(target))
        os.rename(source, target)
    sync(target.parent)
    if _aside(target).is_dir():
        remove(_aside(target))


def remove(path: Path) -> None:
    """Delete a folder; a kill in the middle leaves it whole, or a leftover."""
    doomed = _temporary_name(target_of(path))
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def make(path: Path) -> None:
    """Make a folder and its missing parents, to last."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    private_files.make_folder(path)
    for each in missing:
        sync(each.parent)


def free_bytes(path: Path) -> int | None:
    """Return the free space of the disk that a folder is on, None where its filesystem does not say."""
    found = os.statvfs(path)
    if not found.f_blocks:
        return None
    return found.f_frsize * (found.f_bavail if os.geteuid() else found.f_bfree)


def describe_space(path: Path, num_bytes: int) -> str:
    """Return in words how much space a checkpoint needs, and how much is free where that is known."""
    free = None
    with suppress(OSError):
        free = free_bytes(path)
    known = "" if free is None else f", and {free / 1e6:,.1f} MB are free"
    return f"it takes at least {num_bytes / 1e6:,.1f} MB{known}"


def sync(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    with opened(path) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # filesystems that sync no folders
                raise


def clear_leftovers(parent: Path, is_ours: Callable[[str], bool]) -> None:
    """Remove what killed processes left in `parent` of the folders whose names are ours, and undo half replacements."""
    try:
        paths = sorted(parent.iterdir())
    except OSError:
        return  # no folder yet, or none that may be listed
    for path in paths:
        aside, leftover = _ASIDE.fullmatch(path.name), _TEMPORARY.fullmatch(path.name)
        match = aside or leftover
        if match is None or not is_ours(match["target"]) or path.is_symlink() or not path.is_dir():
            continue
        try:
            if aside and not os.path.lexists(target_of(path)):
                os.rename(path, target_of(path))
                log.info("put back %s, whose replacement was never finished", target_of(path))
            elif aside:
                remove(path)
            elif leftover and _is_dead(path, leftover["host"]):
                shutil.rmtree(path)
                log.info("removed %s, which an interrupted write left", path)
        except OSError as error:
            log.warning("could not clear %s: %s", path, error)


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _temporary_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.{_HOST}-{uuid.uuid4().hex[:12]}")


def _is_dead(path: Path, host: str) -> bool:
    """Return whether no process works in a temporary folder any more."""
    with opened(path) as descriptor:
        locked = _try_lock(descriptor)
        if locked is None or (locked and host != _HOST):
            # Locks of other hosts need not be seen here: there, what was touched since this process began is alive.
            return max(each.lstat().st_mtime for each in (path, *path.iterdir())) < _STARTED
        return locked


def _try_lock(descriptor: int) -> bool | None:
    """Return whether the folder is now locked by us; None where the filesystem has no such locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
