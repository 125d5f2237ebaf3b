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
import threading
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import Any

from hvdtrain.horovod_build.shared import proven_server
from hvdtrain.launch import exchange

log = logging.getLogger("hvdtrain")

_ATTEMPTS = 5  # attempts of a task: its connection may be dropped to make room for another
# BrokenPipeError: the caller closed while we sent. BlockingIOError: the proof did not come in time.
_HUNG_UP = (EOFError, ConnectionResetError, BrokenPipeError, TimeoutError, BlockingIOError)
_LOST_S = 30  # a host that does not answer for so long is lost


@dataclass(frozen=True)
class Address:
    """The address at which the caller listens, and the key with which tasks prove themselves."""

    host: str
    port: int
    key: bytes


class TaskListener(proven_server.ProvenServer):
    """The caller's side: connections that have proven, each in a thread of its own, that a task made them."""

    def __init__(self, host: str, name: str) -> None:  # where to listen, and how tasks reach it
        super().__init__((host, 0), None)
        self.address = Address(name, self.server_address[1], secrets.token_bytes(32))
        self._tasks: deque[Connection] = deque()
        self._ready, self._noted = socket.socketpair()  # a byte for each of these
        self._is_closed = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Let a connection prove itself."""
        connection = Connection(os.dup(request.fileno()))
        try:
            exchange.prove_caller(connection, self.address.key)
        except (AuthenticationError, EOFError, OSError):
            connection.close()
            self.refuse(client_address)
            return
        self.prove(request)
        _notice_loss(request)
        os.close(request.detach())  # else the server would shut it down
        self._tasks.append(connection)
        if self._is_closed:
            connection.close()
        else:
            self._noted.send(b".")

    def refuse(self, client: Any) -> None:
        """Count a connection without a proof, and report the first."""
        with self._guard:
            self.refused += 1
            is_first = self.refused == 1
        if is_first:
            log.warning("refused a connection from %s, which has no proof; the job is not affected", client[0])

    def sources(self) -> list[socket.socket]:
        """Return what to wait for before `take`."""
        return [] if self._is_closed else [self._ready]

    def take(self) -> Connection:
        """Return the connection to a task."""
        self._ready.recv(1)
        return self._tasks.popleft()

    def close(self) -> None:
        """Accept no more connections."""
        self._is_closed = True
        self.shutdown()
        self.server_close()
        while self._tasks:
            self._tasks.popleft().close()
        self._ready.close()
        self._noted.close()


def connect(address: Address) -> Connection:
    """Connect a task to the caller; an OSError or AuthenticationError if it has ended, or has another key."""
    for _ in range(_ATTEMPTS):
        connection = None
        try:
            connection = Client((address.host, address.port), family="AF_INET")
            with _as_socket(connection) as known:
                _limit_reading(known, round(proven_server.HEAD_LIMIT_S))
                exchange.prove_rank(connection, address.key)
                _limit_reading(known, 0)
                _notice_loss(known)
        except BaseException as problem:
            if connection is not None:
                connection.close()
            if not isinstance(problem, _HUNG_UP):
                raise
            why = str(problem) or "it hung up"
            time.sleep(0.2)
        else:
            return connection
    raise ConnectionAbortedError(f"the proof was not accepted: {why}")


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
