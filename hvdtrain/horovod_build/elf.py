"""Read from an ELF file which libraries it loads, and where they are searched."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

MAGIC = b"\x7fELF"

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


@dataclass(frozen=True)
class _Segment:
    kind: int
    offset: int
    address: int
    size: int


def dynamic(data: bytes) -> list[tuple[str, str]]:
    """Return the texts of an ELF file's dynamic section, as (tag, text): ("RUNPATH", "$ORIGIN/../lib").

    Raises:
        ValueError: it is no ELF file, or a damaged one.
    """
    if data[:4] != MAGIC or len(data) < 16:
        raise ValueError("not an ELF file")
    is_64, order = data[4] == 2, "<" if data[5] == 1 else ">"

    def read(layout: str, offset: int) -> tuple[int, ...]:
        return struct.unpack_from(order + layout, data, offset)

    try:
        segments = _segments(read, is_64=is_64)
        entries = _entries(read, segments, is_64=is_64)
        tables = [value for tag, value in entries if tag == _STRING_TABLE]
        texts = [(TAGS[tag], value) for tag, value in entries if tag in TAGS]
        start = _file_offset(tables[0], segments) if texts else 0
        return [(tag, data[start + value : data.index(b"\0", start + value)].decode()) for tag, value in texts]
    except (struct.error, IndexError, UnicodeDecodeError) as problem:
        raise ValueError(f"a damaged ELF file: {problem}") from None


def _segments(read: Callable[[str, int], tuple[int, ...]], *, is_64: bool) -> list[_Segment]:
    (start,) = read("Q", 32) if is_64 else read("I", 28)
    size, count = read("HH", 54) if is_64 else read("HH", 42)
    found = []
    for index in range(count):
        at = start + index * size
        if is_64:
            kind, _, offset, address, _, in_file = read("IIQQQQ", at)
        else:
            kind, offset, address, _, in_file = read("IIIII", at)
        found.append(_Segment(kind, offset, address, in_file))
    return found


def _entries(
    read: Callable[[str, int], tuple[int, ...]], segments: list[_Segment], *, is_64: bool
) -> list[tuple[int, int]]:
    """Return (tag, value) of the dynamic section; none where the file is linked statically."""
    found: list[tuple[int, int]] = []
    layout, size = ("QQ", 16) if is_64 else ("II", 8)
    for segment in segments:
        for at in range(segment.offset, segment.offset + segment.size, size) if segment.kind == _DYNAMIC else ():
            tag, value = read(layout, at)
            if tag == _NULL:
                break
            found.append((tag, value))
    return found


def _file_offset(address: int, segments: list[_Segment]) -> int:
    for segment in segments:
        if segment.kind == _LOAD and segment.address <= address < segment.address + segment.size:
            return segment.offset + address - segment.address
    raise IndexError("its strings are in no segment")
