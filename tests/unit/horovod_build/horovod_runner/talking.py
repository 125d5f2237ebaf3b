"""Talk to a server byte by byte, as a client that may be a stranger."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable


def said(address: tuple[str, int], data: bytes, limit_s: float = 5) -> bytes:
    """Send bytes and return all that comes back."""
    with socket.create_connection(address, limit_s) as connection, contextlib.suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while more := connection.recv(65536):
            answer += more
        return answer
    return b""


def eventually(condition: Callable[[], bool], limit_s: float = 5) -> None:
    """Wait for something to become true."""
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
