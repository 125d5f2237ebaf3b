"""Where a wheel's libraries look for others: beside themselves, and in folders of the system alone.

Whoever can write to a folder that a library names can have code of his run by everybody who loads it. A folder in /tmp
that is gone can be made anew by any user.
"""

from __future__ import annotations

import posixpath
import sys
import zipfile
from pathlib import Path

from hvdtrain.horovod_build import elf, owners
from hvdtrain.horovod_build.errors import LibraryPathError

# From site-packages to the environment: lib/python3.11/site-packages.
_TO_PREFIX = 3


def check(wheel: Path) -> None:
    """Look into every library of a wheel.

    Raises:
        LibraryPathError: one names another folder; the message is a line that names both.
        ValueError: it is no wheel, or a library in it is damaged.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                with archive.open(name) as file:
                    if file.read(len(elf.MAGIC)) != elf.MAGIC:
                        continue
                _check(name, archive.read(name), wheel)
    except zipfile.BadZipFile as problem:
        raise ValueError(f"{wheel} is no wheel: {problem}") from None


def _check(name: str, data: bytes, wheel: Path) -> None:
    for tag, text in elf.dynamic(data):
        if tag in ("RUNPATH", "RPATH"):
            problem = next((f"{each!r}, {why}" for each in text.split(":") if (why := _refused(each, name))), "")
        elif tag in ("NEEDED", "FILTER", "AUXILIARY"):
            problem = f"{text!r}, a path where a name should stand" if "/" in text else ""
        else:
            problem = f"{text!r}, which is loaded into every program ({tag})"
        if problem:
            raise LibraryPathError(
                f"{name} in {wheel.name} would load libraries from {problem}. A wheel may name folders of the system "
                "and of its own environment only: it is neither kept nor installed. LDFLAGS or the compiler's "
                "settings bring this folder in: take it out there, then run `hvdtrain build`"
            )


def _refused(entry: str, library: str) -> str:
    """Return why a library of the wheel must not search `entry`; "" if it may."""
    origin = next((each for each in ("$ORIGIN", "${ORIGIN}") if entry == each or entry.startswith(f"{each}/")), None)
    if origin is not None:
        rest = entry[len(origin) :]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(library), rest.lstrip("/")))
        climbs = place.split("/").count("..")
        return "outside its environment" if climbs > _TO_PREFIX or "$" in rest else ""
    if not entry.startswith("/") or "$" in entry:
        return "which is another folder for each program"
    if sys.prefix != sys.base_prefix and Path(entry).is_relative_to(sys.prefix):
        return "the environment of who built it"
    return "" if owners.is_systems(entry) else "which is not the system's alone"
