"""A TCP server for those who prove that they belong to the job, to which strangers may connect.

A stranger costs a thread and a file descriptor for a short while: a connection must be proven within HEAD_LIMIT_S in
all, however slowly its bytes come, and only so many may be unproven at once. The oldest of them is closed, not the
newest: one of the job's own is proven at once.
"""

from __future__ import annotations

import collections
import contextlib
import resource
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Collection
from typing import Any

HEAD_LIMIT_S = 10.0
_MOST_UNPROVEN = 512
_MOST_NONCES = 100_000


class Nonces:
    """Nonces of requests that were received: a request that somebody has recorded and sends again is refused.

    So many are known, some 12 MB at most; then the oldest are forgotten.
    """

    def __init__(self, most: int = _MOST_NONCES) -> None:
        self._most, self._lock = most, threading.Lock()
        self._known: dict[bytes, None] = {}

    def is_new(self, nonce: bytes) -> bool:
        """Return whether this nonce is received for the first time, and note it."""
        with self._lock:
            if nonce in self._known:
                return False
            self._known[nonce] = None
            if len(self._known) > self._most:
                del self._known[next(iter(self._known))]
            return True


class ProvenServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Runs each connection's handler in a thread of its own.

    A handler calls `prove` once its request is proven, and `refuse` where it is not.

    Args:
        address: where to listen.
        handler: of a connection.
        only_at: addresses of this host at which connections are taken, where it listens at more; empty for all.

    Attributes:
        refused: how many requests were refused.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128  # ranks come all at once

    def __init__(self, address: tuple[str, int], handler: Any, *, only_at: Collection[str] = ()) -> None:
        self.refused = 0
        self._only_at = frozenset(only_at)
        self._guard = threading.Lock()
        self._unproven: collections.OrderedDict[Any, float] = collections.OrderedDict()  # connection -> until when
        self._proven: set[threading.Thread] = set()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = max(16, min(_MOST_UNPROVEN, files // 4 if files > 0 else _MOST_UNPROVEN))
        super().__init__(address, handler)

    def prove(self, connection: Any) -> None:
        """Note that a connection is one of the job's: it may take its time."""
        with self._guard:
            self._unproven.pop(connection, None)
            self._proven.add(threading.current_thread())

    def refuse(self, client: Any) -> None:
        """Count a request that was not proven, and report the first."""
        with self._guard:
            self.refused += 1
            is_first = self.refused == 1
        if is_first:
            with contextlib.suppress(Exception):  # standard error may be closed
                sys.stderr.write(
                    f"refused a request from {client[0]} that was not made with this job's key; "
                    "the job is not affected\n"
                )
                sys.stderr.flush()

    def wait_for_proven(self) -> None:
        """Wait until requests that were proven have been answered."""
        with self._guard:
            threads = self._proven - {threading.current_thread()}
        for thread in threads:
            thread.join()

    # ---- socketserver's

    def serve_forever(self, poll_interval: float = 0.1) -> None:
        """Serve until `shutdown`, which waits for so many seconds."""
        super().serve_forever(poll_interval)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether a connection came by an interface at which it may."""
        return not self._only_at or request.getsockname()[0] in self._only_at

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a connection's thread."""
        with self._guard:
            late = [self._unproven.popitem(last=False)[0]] if len(self._unproven) >= self._most else []
            self._unproven[request] = time.monotonic() + HEAD_LIMIT_S
        _hang_up(late)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._guard:
                self._unproven.pop(request, None)
                self._proven.discard(threading.current_thread())

    def service_actions(self) -> None:
        """Hang up on those whose time is over; `serve_forever` calls this ten times a second and more."""
        now = time.monotonic()
        late = []
        with self._guard:
            while self._unproven and next(iter(self._unproven.values())) <= now:
                late.append(self._unproven.popitem(last=False)[0])
        _hang_up(late)

    def server_close(self) -> None:
        """Listen no more, and hang up on all that are not proven."""
        super().server_close()
        with self._guard:
            late = list(self._unproven)
            self._unproven.clear()
        _hang_up(late)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that the other side has closed."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _hang_up(connections: list[Any]) -> None:
    """End connections in whose threads something is waited for: it is the end of what they read."""
    for connection in connections:
        with contextlib.suppress(OSError):  # that has happened
            connection.shutdown(socket.SHUT_RDWR)
