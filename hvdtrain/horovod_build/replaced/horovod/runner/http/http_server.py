# Copyright 2019 Uber Technologies, Inc. All Rights Reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
# =============================================================================
# Changed by hvdtrain: every request proves by the job's key that it is the job's, before its body is read.
"""The servers through which ranks find each other, and through which a function reaches them."""

from __future__ import annotations

import collections
import io
import logging
import re
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

from horovod.runner.common.util import proof
from horovod.runner.common.util.proven_server import Nonces, ProvenServer
from horovod.runner.util.network import find_port
from horovod.runner.util.threads import in_thread

# Timeout for reading from a single request
SINGLE_REQUEST_TIMEOUT = 3

BAD_REQUEST = 400
FORBIDDEN = 403
TIMEOUT = 408
OK = 200

_HEAD_BYTES = 16 * 1024
_RENDEZVOUS_BYTES = 64 * 1024**2  # of a body: addresses
_KV_STORE_BYTES = 8 * 1024**3  # functions, and what they return
_PATH = re.compile(r"/([^/]+)/([^/]+)")


class KVStoreHandler(BaseHTTPRequestHandler):
    """One request: GET and PUT of /scope/key, and what subclasses add as do_...; nothing else is answered."""

    timeout = SINGLE_REQUEST_TIMEOUT
    server: ProvenHTTPServer

    def handle(self) -> None:
        """Answer one request, if it is proven by its head."""
        self.close_connection = True
        head = self._read_head()
        if head is None:
            return
        if not self._is_proven(head):
            self._refuse()
            return
        self.server.prove(self.connection)
        body = self._read_body()
        if body is None:
            return
        if not proof.is_body(self.headers, body):
            self._refuse()
            return
        self._body = body
        getattr(self, f"do_{self.command}")()

    def do_GET(self) -> None:
        """Answer with a value, or 404."""
        value = self._get_value(self._scope, self._key)
        if value is None:
            self.send_status_code(404)
        else:
            self.answer(OK, value)

    def do_PUT(self) -> None:
        """Keep a value."""
        self._put_value(self._scope, self._key, self._body)
        self.send_status_code(OK)

    def send_status_code(self, status_code: int) -> None:
        """Answer with a status alone."""
        self.answer(status_code)

    def answer(self, status: int, body: bytes = b"") -> None:
        """Send an answer with its proof."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in proof.answer_headers(self.server.key, self.headers, status, body).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing of requests."""

    def send_error(self, *_: Any, **__: Any) -> None:
        """Say nothing yet: http.server calls this for what it cannot parse, and `handle` refuses it."""

    def _read_head(self) -> bytes | None:
        """Return the lines of a head, b"" for what is none, None for a connection closed without data."""
        head = b""
        try:
            while not head.endswith((b"\n\r\n", b"\n\n")):
                line = self.rfile.readline(_HEAD_BYTES - len(head) + 1)
                head += line
                if not line.endswith(b"\n") or len(head) > _HEAD_BYTES:
                    return b"" if head else None
        except OSError:
            return b""
        return head

    def _is_proven(self, head: bytes) -> bool:
        """Return whether a request was made with the job's key, and now for the first time."""
        connection, (self.raw_requestline, _, rest) = self.rfile, head.partition(b"\n")
        self.rfile = io.BytesIO(rest)
        try:
            if not head or not self.parse_request():
                return False
            place = _PATH.fullmatch(self.path)
            length = self.headers.get("Content-Length", "0")
            if place is None or not hasattr(self, f"do_{self.command}") or not re.fullmatch("[0-9]{1,15}", length):
                return False
            (self._scope, self._key), self._length = place.groups(), int(length)
            return proof.is_request(self.server.key, self.command, self.path, self.headers) and self._is_new()
        except Exception:  # noqa: BLE001 - whatever a stranger makes the parser raise
            return False
        finally:
            self.rfile = connection

    def _is_new(self) -> bool:
        seen = self.server.read if self.command == "GET" else self.server.written
        return bool(seen.is_new(bytes.fromhex(self.headers[proof.NONCE])))

    def _read_body(self) -> bytes | None:
        """Return the body of a proven request; None where there is no answer to wait for."""
        if self._length > self.server.body_limit:
            logging.error("KVStore ERROR: a body of %d bytes is too long", self._length)
            self.send_status_code(BAD_REQUEST)
            return None
        try:
            return self.rfile.read(self._length)
        except TimeoutError:
            if self.server.verbose:
                logging.error("KVStore ERROR: Timeout when receiving %d bytes, aborting this request.", self._length)
            self.send_status_code(TIMEOUT)
            return None

    def _refuse(self) -> None:
        self.server.refuse(self.client_address)
        try:
            self.wfile.write(b"HTTP/1.0 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        except OSError:  # it has closed the connection
            pass

    def _get_value(self, scope: str, key: str) -> bytes | None:
        with self.server.cache_lock:
            return self.server.cache.get(scope, {}).get(key)

    def _put_value(self, scope: str, key: str, value: bytes) -> None:
        with self.server.cache_lock:
            scope_dict = self.server.cache.setdefault(scope, {})
            scope_dict[key] = value
            if self.server.verbose:
                logging.info("scope %s has keys %s", scope, list(self.server.cache[scope].keys()))


class RendezvousHandler(KVStoreHandler):
    """Knows DELETE, too."""

    server: RendezvousHTTPServer

    def do_DELETE(self) -> None:
        """Note that a rank is through with a scope."""
        scope, key = self._scope, self._key
        if scope in self.server.scope_size:
            # scope defined by host_alloc_plan at server initialization
            with self.server.finished_list_lock:
                self.server.finished_list[scope].add(key)
                if self.server.scope_size[scope] == len(self.server.finished_list[scope]):
                    with self.server.cache_lock:
                        self.server.cache.get(scope, {}).clear()
                        # This scope's alone: without another one's, its addresses would wait for the next hvd.init.
                        del self.server.finished_list[scope]
                        if self.server.verbose:
                            logging.info(f"Cleared scope {scope}")
        else:
            # scope is an "ad-hoc" scope added by clients
            with self.server.cache_lock:
                if scope in self.server.cache:
                    scope_dict = self.server.cache[scope]
                    if key in scope_dict:
                        del scope_dict[key]
                        if self.server.verbose:
                            logging.info(f"Scope {scope}: Deleted key {key}")
                    if not scope_dict:
                        del self.server.cache[scope]
                        if self.server.verbose:
                            logging.info(f"Deleted empty scope {scope}")
        self.send_status_code(OK)


class ProvenHTTPServer(ProvenServer):
    """Keeps values by scope and key.

    Args:
        address: where to listen.
        handler: of a request.
        verbose: whether to log what is kept.
        key: the job's; None for that in the environment.

    Attributes:
        body_limit: bytes; what is longer is not read.
    """

    body_limit = _KV_STORE_BYTES

    def __init__(self, address: tuple[str, int], handler: Any, verbose: Any, key: bytes | None = None) -> None:
        self.key = proof.job_key() if key is None else key
        self.cache_lock = threading.Lock()
        self.cache: dict[str, dict[str, bytes]] = {}
        self.verbose = verbose
        self.read, self.written = Nonces(), Nonces()  # polling must not make it forget what was written
        super().__init__(address, handler)


class RendezvousHTTPServer(ProvenHTTPServer):
    """Knows how many ranks each scope has."""

    body_limit = _RENDEZVOUS_BYTES

    def __init__(self, address: tuple[str, int], handler: Any, verbose: Any, key: bytes | None = None) -> None:
        # The ranks that are through with each scope; a rank repeats a request whose answer is lost.
        self.finished_list_lock = threading.Lock()
        self.finished_list: dict[str, set[str]] = collections.defaultdict(set)
        # Total size for scopes
        self.scope_size: dict[str, int] = {}
        super().__init__(address, handler, verbose, key)

    def init(self, host_alloc_plan: Any) -> None:
        """Begin a round."""
        with self.cache_lock:
            self.cache.clear()
        with self.finished_list_lock:
            self.finished_list.clear()
        self.scope_size.clear()
        self._extract_scope_size(host_alloc_plan)

    def _extract_scope_size(self, host_alloc_plan: Any) -> None:
        for slot_info in host_alloc_plan:
            self.scope_size["global"] = slot_info.size
            self.scope_size["local_" + slot_info.hostname] = slot_info.local_size
            local_rank = slot_info.local_rank
            self.scope_size["cross_" + str(local_rank)] = slot_info.cross_size

    def should_continue(self) -> bool:
        """Return True."""
        return True


class RendezvousServer:
    """Where ranks find each other.

    Args:
        verbose: whether to log.
        key: the job's, which ranks must have in their environment; None for that in this one's.

    Raises:
        RuntimeError: there is no key.
    """

    def __init__(self, verbose: Any = 0, key: bytes | None = None) -> None:
        self._key = proof.job_key() if key is None else key
        self._httpd: Any = None
        self._listen_thread: Any = None
        self._verbose = verbose

    def start(self, handler_cls: Any = RendezvousHandler, host: str = "") -> int:
        """Listen at an address of this host, "" for all, and return the port; call `init` afterwards."""
        self._httpd, port = find_port(
            lambda addr: RendezvousHTTPServer(addr, handler_cls, self._verbose, self._key), host
        )
        if self._verbose:
            logging.info("Rendezvous INFO: HTTP rendezvous server started.")
        self._listen_thread = in_thread(target=self._httpd.serve_forever)
        return int(port)

    def init(self, host_alloc_plan: Any) -> None:
        """Begin a round of ranks at their places."""
        self._httpd.init(host_alloc_plan)

    def stop(self) -> None:
        """Listen no more."""
        self._httpd.shutdown()
        self._listen_thread.join()
        self._httpd.server_close()


class KVStoreHTTPServer(ProvenHTTPServer):
    """A store without ranks."""


class KVStoreServer:
    """Hands a function out to ranks, and takes what it returned.

    Args:
        verbose: whether to log.
        key: as for `RendezvousServer`.
    """

    def __init__(self, verbose: Any, key: bytes | None = None) -> None:
        self._key = proof.job_key() if key is None else key
        self.httpd: Any = None
        self.listen_thread: Any = None
        self.verbose = verbose

    def start_server(self, host: str = "") -> int:
        """Listen at an address of this host, "" for all, and return the port."""
        self.httpd, port = find_port(
            lambda addr: KVStoreHTTPServer(addr, KVStoreHandler, self.verbose, self._key), host
        )
        self.listen_thread = in_thread(target=self.httpd.serve_forever)
        if self.verbose:
            logging.info("KVStoreServer INFO: KVStore server started. Listen on port " + str(port))
        return int(port)

    def shutdown_server(self) -> None:
        """Listen no more."""
        self.httpd.shutdown()
        self.httpd.server_close()
        if self.verbose:
            logging.info("KVStoreServer INFO: KVStore server finishes.")
        # Because this thread is daemonized, no need to join.
