"""Only the owner can read a run's files, whatever the umask; with HVDTRAIN_SHARE_FILES=1 the umask decides.

Existing files and folders keep their mode, but new files in a shared folder are private.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

SHARE = "HVDTRAIN_SHARE_FILES"


def make_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Make a folder and its missing parents; a FileExistsError as of `Path.mkdir`."""
    mode = 0o777 if os.environ.get(SHARE) == "1" else 0o700
    for parent in reversed(path.parents):
        if not parent.exists():
            parent.mkdir(mode, exist_ok=True)
    path.mkdir(mode, exist_ok=exist_ok)


def open_file(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file for writing; `options` are as in `open`."""
    return open(path, mode, opener=_open, **options)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8."""
    with open_file(path, "w", encoding="utf-8") as file:
        file.write(text)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags, 0o666 if os.environ.get(SHARE) == "1" else 0o600)
