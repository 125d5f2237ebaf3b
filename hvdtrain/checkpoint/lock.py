"""One writer for a folder of checkpoints: a file lock, which the kernel releases when its process ends, even if killed.

The file names the holder. Other hosts see the lock only if the shared filesystem supports locks across hosts.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path

from hvdtrain.checkpoint import folders
from hvdtrain.errors import CheckpointError, FolderInUseError

log = logging.getLogger("hvdtrain")

NAME = ".lock"
_POLL_S = 0.2
_MAX_BYTES = 10_000
_UNREAD_S = 2.0  # how long a new holder may take to write its facts into the file
_MOST_TRIES = 100


@dataclass(frozen=True)
class Holder:
    """The holder of a folder; by default this process, from now on."""

    run: str  # its id
    name: str  # its name, for people
    job: str | None  # the id that all starts of one `hvdtrain run` share; None under another launcher
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    since: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))


class _HeldError(Exception):
    """Another process holds the lock; the argument is its Holder, None where the file does not name it."""


class FolderLock:
    """Holds a folder of checkpoints for this process; several locks of one process may hold the same."""

    def __init__(self, folder: Path) -> None:
        self._path = Path(os.path.realpath(folder)) / NAME
        self._descriptor = -1

    def acquire(self, holder: Holder, *, is_own: Callable[[Holder], bool], limit_s: float) -> None:
        """Lock the folder; do nothing if it cannot be written or its filesystem has no locks.

        Wait up to `limit_s` for an earlier start of this run (`is_own`), which is about to end, and for a holder on
        another host: if that host is lost, a shared disk holds its lock for some time.

        Raises:
            FolderInUseError: another run holds it.
            CheckpointError: an earlier start of this run still holds it; a later start may succeed.
        """
        began, is_said = time.monotonic(), False
        while self not in _held:
            try:
                self._take(holder)
                return
            except _HeldError as held:
                other: Holder | None = held.args[0]
            if other is None:
                patience_s = _UNREAD_S
            else:
                patience_s = limit_s if is_own(other) or other.host != holder.host else 0.0
            if time.monotonic() - began >= patience_s:
                kind = CheckpointError if other is not None and is_own(other) else FolderInUseError
                raise kind(_refusal(self._path.parent, other))
            if other is not None and not is_said:
                is_said = True
                where = (other.pid, other.host, self._path.parent)
                log.info("waiting for process %d on %s, which writes to %s, for up to %.0f s", *where, patience_s)
            time.sleep(_POLL_S)

    def _take(self, holder: Holder) -> None:
        shared = next((each for each in _held if each._path == self._path), None)
        descriptor = _lock(self._path) if shared is None else os.dup(shared._descriptor)
        if descriptor is not None:
            self._descriptor = descriptor
            _held.append(self)
            if shared is None:
                self.describe(holder)

    def describe(self, holder: Holder) -> None:
        """Write the holder into the file."""
        if self not in _held:
            return
        line = json.dumps(asdict(holder)).encode() + b"\n"
        try:
            os.pwrite(self._descriptor, line, 0)  # a reader reads the first line only, so it never sees a mix
            os.ftruncate(self._descriptor, len(line))
            os.fsync(self._descriptor)  # until then other hosts do not see it
        except OSError as error:  # the lock is held nevertheless
            log.debug("%s does not name its holder: %s", self._path, error)

    def release(self) -> None:
        """Unlock the folder, if this object holds it."""
        if self not in _held:
            return
        _held.remove(self)
        if all(each._path != self._path for each in _held) and _is_at(self._descriptor, self._path):
            # Before unlocking: a process that has opened this file sees that it is removed, and makes another.
            with suppress(OSError):
                self._path.unlink()
        os.close(self._descriptor)


_held: list[FolderLock] = []  # of this process; those of one folder share one lock by duplicates of its descriptor


def _forget() -> None:
    """Close a forked child's copies, as in a DataLoader's worker: they would hold the lock after this process died."""
    for lock in _held:
        os.close(lock._descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


def _lock(path: Path) -> int | None:
    """Return the descriptor of a file that is now locked; None if no lock is possible. Raises _HeldError."""
    problem: str | None = "its .lock is replaced all the time"
    for _ in range(_MOST_TRIES):
        try:
            folders.make(path.parent)
            descriptor, is_writable = _opened(path)
        except OSError:
            return None  # the check before the first epoch reports that the folder cannot be written
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise _HeldError(holder) from None
        except OSError as error:
            os.close(descriptor)
            problem = error.strerror
            break
        if not is_writable and _is_at(descriptor, path):
            with suppress(OSError):  # it names a process that has died, and only its user could rewrite it
                path.unlink()
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # the file was removed in the meantime
    log.warning("%s: no file locks (%s). Make sure that no other run writes to it", path.parent, problem)
    return None


def _opened(path: Path) -> tuple[int, bool]:
    """Return the file's descriptor, and whether this process may write to it."""
    try:
        # In a shared folder other users must see that it is in use, and by whom.
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), True
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW), False  # another user's


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


def _holder(descriptor: int) -> Holder | None:
    try:
        found = json.loads(os.pread(descriptor, _MAX_BYTES, 0).partition(b"\n")[0])
        return Holder(**{each.name: found[each.name] for each in fields(Holder)})  # a later version may say more
    except (OSError, ValueError, TypeError, KeyError):
        return None  # its holder has just locked it, and not yet written the file


def _refusal(folder: Path, other: Holder | None) -> str:
    who, end = "Another process", "end that process"
    if other is not None:
        who = f"Run {other.name} ({other.run}), process {other.pid} on host {other.host} since {other.since},"
        end = f"end that run (on {other.host}: kill {other.pid}; if that host is lost, wait some minutes)"
    return (
        f"{who} writes checkpoints to {folder}, and a folder has one writer. Give this run a folder of its own, or "
        f'{end} and start this run again. It resumes from the checkpoints there; fit(resume="never") moves them aside.'
    )
