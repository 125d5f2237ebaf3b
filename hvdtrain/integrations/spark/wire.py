"""What the caller and the Spark tasks tell each other while ranks run: lines, ends, requests to stop.

Only JSON goes over this wire, and both sides first prove that they hold a key drawn for this call. The function and
what it returns travel inside the Spark job, and are as safe as Spark's own traffic is.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import Any

from hvdtrain.runner import exchange

_STRANGER_S = 5  # for a stranger who connects and says nothing
_LOST_S = 30  # after which a host that does not answer any more is gone


@dataclass(frozen=True)
class Address:
    """Where the caller listens, and the key to be let in."""

    host: str
    port: int
    key: bytes


class Door:
    """The caller's side.

    Args:
        host: where to listen.
        name: under which tasks reach it.
    """

    def __init__(self, host: str, name: str) -> None:
        self.socket = socket.create_server((host, 0), backlog=128)
        self.address = Address(name, self.socket.getsockname()[1], secrets.token_bytes(32))

    def let_in(self) -> Connection | None:
        """Return who knocks; None for a stranger."""
        found, _ = self.socket.accept()
        _limit_reading(found, _STRANGER_S)
        connection = Connection(found.detach())
        try:
            exchange.know_rank(connection, self.address.key)
        except (AuthenticationError, EOFError, OSError):
            connection.close()
            return None
        with _as_socket(connection) as known:
            _limit_reading(known, 0)
            _notice_loss(known)
        return connection

    def close(self) -> None:
        """Let nobody in any more."""
        self.socket.close()


def knock(address: Address) -> Connection:
    """Return, in a task, the connection to the caller.

    Raises:
        OSError, AuthenticationError: there is no caller any more, or it cannot be reached.
    """
    connection = Client((address.host, address.port), family="AF_INET")
    exchange.know_caller(connection, address.key)
    with _as_socket(connection) as known:
        _notice_loss(known)
    return connection


def own_address(connection: Connection) -> str:
    """Return this side's IP address."""
    with _as_socket(connection) as known:
        return str(known.getsockname()[0])


def tell(connection: Connection, **facts: Any) -> None:
    """Say something.

    Raises:
        OSError: the other side has ended.
    """
    connection.send_bytes(json.dumps(facts).encode())


def hear(connection: Connection) -> dict[str, Any] | None:
    """Return what the other side says, None where it has ended."""
    try:
        heard: dict[str, Any] = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return None
    return heard


def _as_socket(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))


def _limit_reading(found: socket.socket, seconds: int) -> None:
    """Make a read fail that waits longer; 0 for no limit. A timeout of Python's own would be lost with the object."""
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _notice_loss(found: socket.socket) -> None:
    """Have the system ask a silent other side whether it is there."""
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _LOST_S // 3), ("TCP_KEEPINTVL", _LOST_S // 6), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # what was said and is not acknowledged
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _LOST_S)
