"""Write a script's checkpoints to a temporary folder while `hvdtrain bench` runs it; its own stay as they are."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.system.user_paths import expanded

VARIABLE = "HVDTRAIN_SCRATCH"  # a folder that `hvdtrain bench` makes and deletes, a rank of another host there

_KERAS_WRITERS = frozenset({"ModelCheckpoint", "BackupAndRestore", "CSVLogger", "TensorBoard"})

_own: Path | None = None


def is_on() -> bool:
    """Return whether this process must leave the script's files alone."""
    return bool(os.environ.get(VARIABLE))


def place(path: str | os.PathLike[str]) -> Path:
    """Return where to write what belongs at `path`: there, or at its place in this process's temporary folder."""
    global _own
    path = expanded(path)
    if not is_on():
        return path
    if _own is None:
        _own = Path(os.environ[VARIABLE]) / f"{socket.gethostname()}-{os.getpid()}"
        atexit.register(_clear, os.getpid())
    return _own / Path(os.path.realpath(path)).relative_to("/")


def found(path: str | os.PathLike[str]) -> Path:
    """Return where to read what belongs at `path`: what this process wrote instead of it, else there."""
    placed = place(path)
    return placed if placed.exists() else expanded(path)


def is_keras_writer(callback: Any) -> bool:
    """Return whether a callback is one of Keras's that write files."""
    bases = type(callback).__mro__
    return any(base.__module__.startswith("keras.") and base.__name__ in _KERAS_WRITERS for base in bases)


def _clear(pid: int) -> None:
    if _own is not None and os.getpid() == pid:
        shutil.rmtree(_own, ignore_errors=True)
        with suppress(OSError):
            _own.parent.rmdir()  # on another host than bench's; not while ranks beside this one are at work
