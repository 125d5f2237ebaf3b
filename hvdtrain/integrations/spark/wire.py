"""Messages between the caller and the Spark tasks while ranks run: lines, ends, requests to stop.

All messages are JSON. Before the first one both sides prove that they have a key, which is made for this call. The
function and what it returns are part of the Spark job, and are as safe as Spark's own traffic is.
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

from hvdtrain.launch import exchange

log = logging.getLogger("hvdtrain")

_PROOF_S = 5.0  # how long a new connection may take to prove that a task made it
_MOST_UNPROVEN = 64  # connections at once; a task's proof takes milliseconds
_ATTEMPTS = 5  # attempts of a task: its connection may be dropped to make room for another
_HEADER = struct.Struct("!i")  # the length, before each message of multiprocessing's
_LOST_S = 30  # a host that does not answer for so long is lost


@dataclass(frozen=True)
class Address:
    """Where the caller listens, and the key with which tasks prove themselves."""

    host: str
    port: int
    key: bytes


@dataclass
class _Unproven:  # a connection that has not yet proven that a task made it
    host: str
    challenge: bytes
    until: float
    received: bytes = b""


class TaskListener:
    """The caller's side. No connection blocks it: each has a deadline, and must first send a proof."""

    def __init__(self, host: str, name: str) -> None:  # where to listen, and how tasks reach it
        self.refused = 0
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)
        self._unproven: dict[socket.socket, _Unproven] = {}
        self.address = Address(name, self._listener.getsockname()[1], secrets.token_bytes(32))

    def sources(self) -> list[socket.socket]:
        """Return what to wait for; `take` what is ready. Call this at least once a second."""
        now = time.monotonic()
        for found in [found for found, who in self._unproven.items() if who.until < now]:
            self._refuse(found, "sent no proof in time")
        return [self._listener, *self._unproven] if self._listener.fileno() >= 0 else []

    def take(self, source: socket.socket) -> Connection | None:
        """Return the connection to a task that has proven itself; None if there is none yet."""
        if source is self._listener:
            self._accept()
            return None
        return self._read_proof(source) if source in self._unproven else None

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()
        for found in self._unproven:
            found.close()
        self._unproven.clear()

    def _accept(self) -> None:
        """Accept a connection, and send a challenge."""
        try:
            found, (host, *_) = self._listener.accept()
        except OSError:  # it is closed already
            return
        found.setblocking(False)
        if len(self._unproven) >= _MOST_UNPROVEN:
            crowd = Counter(who.host for who in self._unproven.values()).most_common(1)[0][0]
            oldest = next(found for found, who in self._unproven.items() if who.host == crowd)
            self._refuse(oldest, "has too many connections without a proof")
        who = self._unproven[found] = _Unproven(host, exchange.challenge(), time.monotonic() + _PROOF_S)
        try:
            found.send(_HEADER.pack(len(who.challenge)) + who.challenge)  # a new connection's buffer holds it
        except OSError:
            self._refuse(found, "closed it at once")

    def _read_proof(self, found: socket.socket) -> Connection | None:
        """Read as much of a proof as there is."""
        who, whole = self._unproven[found], _HEADER.size + exchange.ANSWER_BYTES
        try:
            received = found.recv(whole - len(who.received))
        except BlockingIOError:
            return None
        except OSError:
            received = b""
        who.received += received
        if not received or not _HEADER.pack(exchange.ANSWER_BYTES).startswith(who.received[: _HEADER.size]):
            self._refuse(found, "sent no valid proof")
        elif len(who.received) == whole:
            try:
                reply = exchange.reply(self.address.key, who.challenge, who.received[_HEADER.size :])
                found.send(_HEADER.pack(len(reply)) + reply)
            except (AuthenticationError, OSError):
                self._refuse(found, "has another key")
            else:
                del self._unproven[found]
                found.setblocking(True)
                _notice_loss(found)
                return Connection(found.detach())
        return None

    def _refuse(self, found: socket.socket, why: str) -> None:
        who = self._unproven.pop(found)
        found.close()
        self.refused += 1
        if self.refused == 1:
            log.warning("refused a connection from %s, which %s; the job is not affected", who.host, why)


def connect(address: Address) -> Connection:
    """Connect a task to the caller; an OSError or AuthenticationError if it has ended, or has another key."""
    for _ in range(_ATTEMPTS):
        try:
            return _connect(address)
        except (EOFError, ConnectionResetError, TimeoutError, BlockingIOError) as error:
            problem = error
            time.sleep(0.2)
    raise ConnectionAbortedError(f"the proof was not accepted: {problem or 'it hung up'}")


def _connect(address: Address) -> Connection:
    connection = Client((address.host, address.port), family="AF_INET")
    try:
        with _as_socket(connection) as known:
            _limit_reading(known, round(2 * _PROOF_S))
            exchange.prove_rank(connection, address.key)
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


def send(connection: Connection, **facts: Any) -> None:
    """Send a message; an OSError says that the other side has ended."""
    connection.send_bytes(json.dumps(facts).encode())


def receive(connection: Connection) -> dict[str, Any] | None:
    """Return the next message of the other side; None if that has ended."""
    try:
        return dict(json.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        return None


def _as_socket(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))


def _limit_reading(found: socket.socket, seconds: int) -> None:
    """Make a read fail that waits longer; 0 for no limit. Python's own timeout would be lost with the socket object."""
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _notice_loss(found: socket.socket) -> None:
    """Let the system notice a lost host (TCP keepalive)."""
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        (socket.TCP_KEEPIDLE, _LOST_S // 3), (socket.TCP_KEEPINTVL, _LOST_S // 6), (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, 1000 * _LOST_S),  # for data that is sent and not acknowledged
    ):  # fmt: skip
        found.setsockopt(socket.IPPROTO_TCP, name, value)
