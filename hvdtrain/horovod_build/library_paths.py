"""Check where a wheel's libraries look for other libraries: in their own environment and the system's folders only.

A user who can write to a folder that a library names can run code in the process of everybody who loads the library.
If the folder was in /tmp and is removed, any user can create it again.
"""

from __future__ import annotations

import posixpath
import struct
import sys
import zipfile
from itertools import takewhile
from operator import itemgetter
from pathlib import Path

from hvdtrain.horovod_build import owners
from hvdtrain.horovod_build.errors import BuildError

_MAGIC = b"\x7fELF"
_LOAD, _DYNAMIC = 1, 2  # segments
_STRING_TABLE = 5  # in the dynamic section, as are these tags whose value is a text
_FOLDERS, _NAMES = {15: "RPATH", 29: "RUNPATH"}, {1: "NEEDED", 0x7FFFFFFD: "AUXILIARY", 0x7FFFFFFF: "FILTER"}
_TAGS = {0x6FFFFEFA: "CONFIG", 0x6FFFFEFB: "DEPAUDIT", 0x6FFFFEFC: "AUDIT"} | _FOLDERS | _NAMES


def check(wheel: Path) -> None:
    """Raise BuildError if a library of a wheel names another folder; ValueError if the wheel is damaged."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if (data := archive.read(name)).startswith(_MAGIC):
                    _check(name, data, wheel)
    except zipfile.BadZipFile as problem:
        raise ValueError(f"{wheel} is not a wheel: {problem}") from None


def dynamic(data: bytes) -> list[tuple[str, str]]:
    """Return the texts of a dynamic section, of x86_64's or aarch64's ELF files: ("RUNPATH", "$ORIGIN/../lib"), ..."""
    if data[:6] != _MAGIC + b"\x02\x01":
        raise ValueError("not an ELF file of 64 bits, little-endian")
    try:
        (table,), (size, count) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
        # Each: kind, flags, offset in the file, address, physical address, size in the file.
        segments = [struct.unpack_from("<IIQQQQ", data, table + index * size) for index in range(count)]
        places = [range(offset, offset + length, 16) for kind, _, offset, *_, length in segments if kind == _DYNAMIC]
        sections = [(struct.unpack_from("<QQ", data, at) for at in each) for each in places]
        entries = [entry for each in sections for entry in takewhile(itemgetter(0), each)]  # each to its own NULL
        texts = [(_TAGS[tag], value) for tag, value in entries if tag in _TAGS]
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
        if tag in _FOLDERS.values():
            problem = next((f"{each!r}, {why}" for each in text.split(":") if (why := _refused(each, name))), "")
        elif tag in _NAMES.values():
            problem = f"{text!r}, a path where a name should stand" if "/" in text else ""
        else:
            problem = f"{text!r}, which is loaded into every program ({tag})"
        if problem:
            raise BuildError(
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
        climbs = place.split("/").count("..")  # at most to the environment, from lib/python3.11/site-packages
        return "outside its environment" if climbs > 3 or "$" in rest else ""
    if not entry.startswith("/") or "$" in entry:
        return "which is another folder for each program"
    if sys.prefix != sys.base_prefix and Path(entry).is_relative_to(sys.prefix):
        return "the environment in which it was built"
    return "" if owners.is_systems(entry) else "which is not the system's alone"
