"""What the caller and the Spark tasks tell each other while ranks run: lines, ends, requests to stop.

Only JSON goes over this wire, and both sides first prove that they hold a key drawn for this call. The function and
what it returns travel inside the Spark job, and are as safe as Spark's own traffic is.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import Any

from hvdtrain.runner import exchange

log = logging.getLogger("hvdtrain")

_STRANGER_S = 5.0  # for who connects to prove that it is a task
_MOST_UNPROVEN = 64  # connections at once; a task's own takes milliseconds
_KNOCKS = 5  # of a task, whose connection may be the one that is dropped for another
_HEADER = struct.Struct("!i")  # of a message of multiprocessing's: its length
_LOST_S = 30  # after which a host that does not answer any more is gone


@dataclass(frozen=True)
class Address:
    """Where the caller listens, and the key to be let in."""

    host: str
    port: int
    key: bytes


@dataclass
class _Unproven:
    """Who has connected and has not yet proven that it is a task."""

    host: str
    challenge: bytes
    until: float
    said: bytes = b""


class Door:
    """The caller's side. Nobody who connects is waited for: each has a deadline, and may say only what a proof takes.

    Args:
        host: where to listen.
        name: under which tasks reach it.
    """

    def __init__(self, host: str, name: str) -> None:
        self.refused = 0
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)
        self._unproven: dict[socket.socket, _Unproven] = {}
        self.address = Address(name, self._listener.getsockname()[1], secrets.token_bytes(32))

    def sources(self) -> list[socket.socket]:
        """Return what to wait for, `take` it once it is ready; call this at least once a second."""
        now = time.monotonic()
        for found in [found for found, who in self._unproven.items() if who.until < now]:
            self._refuse(found, "said nothing that proves it")
        return [self._listener, *self._unproven] if self._listener.fileno() >= 0 else []

    def take(self, source: socket.socket) -> Connection | None:
        """Return the connection to a task that has proven itself; None where nobody has yet."""
        if source is self._listener:
            self._ask()
        elif source in self._unproven:
            return self._hear(source)
        return None

    def close(self) -> None:
        """Let nobody in any more."""
        self._listener.close()
        for found in self._unproven:
            found.close()
        self._unproven.clear()

    def _ask(self) -> None:
        """Take a connection, and send a challenge."""
        try:
            found, (host, *_) = self._listener.accept()
        except OSError:  # it has gone again
            return
        found.setblocking(False)
        if len(self._unproven) >= _MOST_UNPROVEN:
            crowd = Counter(who.host for who in self._unproven.values()).most_common(1)[0][0]
            oldest = next(found for found, who in self._unproven.items() if who.host == crowd)
            self._refuse(oldest, "has too many connections without a proof")
        who = _Unproven(host, exchange.challenge(), time.monotonic() + _STRANGER_S)
        self._unproven[found] = who
        try:
            found.send(_HEADER.pack(len(who.challenge)) + who.challenge)  # a new connection's buffer holds it
        except OSError:
            self._refuse(found, "has gone")

    def _hear(self, found: socket.socket) -> Connection | None:
        """Read as much of a proof as there is."""
        who = self._unproven[found]
        whole = _HEADER.size + exchange.ANSWER_BYTES
        try:
            said = found.recv(whole - len(who.said))
        except BlockingIOError:
            return None
        except OSError:
            said = b""
        who.said += said
        length = who.said[: _HEADER.size]
        if not said or not _HEADER.pack(exchange.ANSWER_BYTES).startswith(length):
            self._refuse(found, "said what is no proof")
            return None
        if len(who.said) < whole:
            return None
        try:
            reply = exchange.reply(self.address.key, who.challenge, who.said[_HEADER.size :])
            found.send(_HEADER.pack(len(reply)) + reply)
        except (AuthenticationError, OSError):
            self._refuse(found, "has another key")
            return None
        del self._unproven[found]
        found.setblocking(True)
        _notice_loss(found)
        return Connection(found.detach())

    def _refuse(self, found: socket.socket, why: str) -> None:
        who = self._unproven.pop(found)
        found.close()
        self.refused += 1
        if self.refused == 1:
            log.warning("refused a connection from %s, which %s; the ranks are not concerned", who.host, why)


def knock(address: Address) -> Connection:
    """Return, in a task, the connection to the caller.

    Raises:
        OSError, AuthenticationError: there is no caller any more, or it cannot be reached.
    """
    for left in reversed(range(_KNOCKS)):
        try:
            return _knock(address)
        except (EOFError, ConnectionResetError, TimeoutError, BlockingIOError) as problem:
            if not left:
                raise ConnectionAbortedError(f"it took no proof: {problem or 'it closed the connection'}") from None
            time.sleep(0.2)
    raise AssertionError


def _knock(address: Address) -> Connection:
    connection = Client((address.host, address.port), family="AF_INET")
    try:
        with _as_socket(connection) as known:
            _limit_reading(known, round(2 * _STRANGER_S))
            exchange.know_caller(connection, address.key)
            _limit_reading(known, 0)
            _notice_loss(known)
    except BaseException:
        connection.close()
        raise
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
