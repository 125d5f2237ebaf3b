"""Read processes' sockets from /proc: what the kernel says, not the job."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

import psutil

_LISTENS = "0A"


def marked(mark: str) -> set[int]:
    """Return the living processes whose environment has HVDTRAIN_TEST_MARK=`mark`, and all below them."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get("HVDTRAIN_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found |= {process.pid, *(child.pid for child in process.children(recursive=True))}
        except psutil.Error:
            continue
    return found


def inodes(pids: Iterable[int]) -> set[str]:
    """Return the sockets that processes hold, by inode."""
    found = set()
    for pid in pids:
        for name in _entries(f"/proc/{pid}/fd"):
            try:
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
            except OSError:  # closed meanwhile
                continue
            found |= {match[1]} if match else set()
    return found


def network(pids: Iterable[int], *, listening: bool = True) -> set[str]:
    """Return the local addresses of processes' TCP and UDP sockets; of TCP's those that listen, or all."""
    mine, found = inodes(pids), set()
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in _lines(name):
            fields = line.split()
            if fields[9] in mine and (not listening or name.startswith("udp") or fields[3] == _LISTENS):
                found.add(_address(fields[1]))
    return found


def unix(pids: Iterable[int]) -> set[str]:
    """Return the names at which processes' unix sockets listen: files, or with @ abstract names."""
    mine, found = inodes(pids), set()
    for line in _lines("unix"):
        fields = line.split(maxsplit=7)
        if fields[6] in mine and int(fields[3], 16) & 0x10000:  # SO_ACCEPTCON
            found.add(fields[7] if len(fields) > 7 else "no name")
    return found


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _lines(name: str) -> list[str]:
    path = Path("/proc/net", name)
    return path.read_text().splitlines()[1:] if path.exists() else []


def _address(text: str) -> str:
    """Return "127.0.0.1" of "0100007F:1F90": the kernel writes each word in the host's own order."""
    words = text.partition(":")[0]
    raw = b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
