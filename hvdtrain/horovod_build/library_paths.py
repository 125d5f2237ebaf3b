"""Check where a wheel's libraries look for other libraries: in their own environment and the system's folders only.

A user who can write to a folder that a library names can run code in the process of everybody who loads the library.
If the folder was in /tmp and is removed, any user can create it again.
"""

from __future__ import annotations

import posixpath
import struct
import sys
import zipfile
from pathlib import Path

from hvdtrain.horovod_build import owners
from hvdtrain.horovod_build.errors import LibraryPathError

_MAGIC = b"\x7fELF"
_LOAD, _DYNAMIC = 1, 2  # segments
_NULL, _STRING_TABLE = 0, 5
# Tags of the dynamic section whose value is a text.
TAGS = {
    1: "NEEDED",
    15: "RPATH",
    29: "RUNPATH",
    0x6FFFFEFA: "CONFIG",
    0x6FFFFEFB: "DEPAUDIT",
    0x6FFFFEFC: "AUDIT",
    0x7FFFFFFD: "AUXILIARY",
    0x7FFFFFFF: "FILTER",
}

# From site-packages to the environment: lib/python3.11/site-packages.
_TO_PREFIX = 3


def check(wheel: Path) -> None:
    """Check every library of a wheel.

    Raises:
        LibraryPathError: a library names another folder; the message is one line that names both.
        ValueError: the file is not a wheel, or a library in it is damaged.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                with archive.open(name) as file:
                    if file.read(len(_MAGIC)) != _MAGIC:
                        continue
                _check(name, archive.read(name), wheel)
    except zipfile.BadZipFile as problem:
        raise ValueError(f"{wheel} is not a wheel: {problem}") from None


def dynamic(data: bytes) -> list[tuple[str, str]]:
    """Return the texts of a dynamic section, of x86_64's or aarch64's ELF files: ("RUNPATH", "$ORIGIN/../lib"), ..."""
    if data[:6] != _MAGIC + b"\x02\x01":
        raise ValueError("not an ELF file of 64 bits, little-endian")

    def read(layout: str, offset: int) -> tuple[int, ...]:
        return struct.unpack_from(f"<{layout}", data, offset)

    try:
        (table,), (size, count) = read("Q", 32), read("HH", 54)
        # Each: kind, flags, offset in the file, address, physical address, size in the file.
        segments = [read("IIQQQQ", table + index * size) for index in range(count)]
        entries: list[tuple[int, ...]] = []
        for kind, _, offset, _, _, length in segments:
            for at in range(offset, offset + length, 16) if kind == _DYNAMIC else ():
                entry = read("QQ", at)
                if entry[0] == _NULL:
                    break
                entries.append(entry)
        texts = [(TAGS[tag], value) for tag, value in entries if tag in TAGS]
        if not texts:
            return []
        (strings,) = (value for tag, value in entries if tag == _STRING_TABLE)
        (start,) = (
            offset + strings - address
            for kind, _, offset, address, _, length in segments
            if kind == _LOAD and address <= strings < address + length
        )
        return [(tag, data[start + value : data.index(b"\0", start + value)].decode()) for tag, value in texts]
    except (struct.error, ValueError) as problem:
        raise ValueError(f"a damaged ELF file: {problem}") from None


def _check(name: str, data: bytes, wheel: Path) -> None:
    for tag, text in dynamic(data):
        if tag in ("RUNPATH", "RPATH"):
            problem = next((f"{each!r}, {why}" for each in text.split(":") if (why := _refused(each, name))), "")
        elif tag in ("NEEDED", "FILTER", "AUXILIARY"):
            problem = f"{text!r}, a path where a name should stand" if "/" in text else ""
        else:
            problem = f"{text!r}, which is loaded into every program ({tag})"
        if problem:
            raise LibraryPathError(
                f"{name} in {wheel.name} would load libraries from {problem}. A wheel may name only folders of the "
                "system and of its own environment, so this one is neither kept nor installed. Remove the folder from "
                "LDFLAGS or the compiler's settings, then run `hvdtrain build`"
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
        return "the environment in which it was built"
    return "" if owners.is_systems(entry) else "which is not the system's alone"
