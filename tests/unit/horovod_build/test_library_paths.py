"""Reading an ELF file's dynamic section; tests/attack/test_libraries.py has real libraries."""

from __future__ import annotations

import struct

from hvdtrain.horovod_build import library_paths


def test_each_dynamic_segment_is_read_to_its_own_end() -> None:
    texts = b"\0libc.so.6\0/tmp/there\0"
    first = struct.pack("<6Q", 5, 0, 1, 1, 0, 0)  # where the texts are; NEEDED; the end
    second = struct.pack("<4Q", 29, texts.index(b"/"), 0, 0)  # RUNPATH; the end
    at = 64 + 3 * 56
    parts = [(1, at, texts), (2, at + len(texts), first), (2, at + len(texts) + len(first), second)]
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 32, 64)
    struct.pack_into("<HH", head, 54, 56, 3)
    table = b"".join(struct.pack("<II6Q", kind, 0, place, 0, 0, len(data), 0, 0) for kind, place, data in parts)
    elf = bytes(head) + table + texts + first + second
    assert library_paths.dynamic(elf) == [("NEEDED", "libc.so.6"), ("RUNPATH", "/tmp/there")]
