"""Ranks over Gloo without a launcher, and a rendezvous for them that does as a test says."""

from __future__ import annotations

import http.server
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hvdtrain.horovod_build import changes

sys.path.insert(0, str(changes.ROOT / "added/horovod/runner/common/util"))
import proof

KEY = "5b" * 32


class Rendezvous(http.server.BaseHTTPRequestHandler):
    """Answers as the rendezvous does, or as somebody does who only listens at its address."""

    key: bytes | None = None  # the answers' key, if any
    status = 0  # what every request is answered with, if not 0
    store: dict[str, bytes]
    unproven: list[str]
    requests: int

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server = type(self)
        server.requests += 1
        right = bytes.fromhex(KEY)
        if not proof.is_request(right, self.command, self.path, self.headers) or not proof.is_body(self.headers, body):
            server.unproven.append(self.path)
        if self.command == "PUT":
            self.store[self.path] = body
        value = self.store.get(self.path, b"") if self.command == "GET" else b""
        status = self.status or (404 if self.command == "GET" and self.path not in self.store else 200)
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        for name, text in (proof.answer_headers(self.key, self.headers, status, value) if self.key else {}).items():
            self.send_header(name.upper(), text)
        self.end_headers()
        self.wfile.write(value)

    do_GET = do_PUT = do_DELETE = handle_any  # noqa: N815 (http.server's names)

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 1024  # of 5, a sixth rank at once waits a second


@contextmanager
def rendezvous(**answers: object) -> Iterator[tuple[int, type[Rendezvous]]]:
    handler = type("Handler", (Rendezvous,), {"store": {}, "unproven": [], "requests": 0, **answers})
    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], handler
        server.shutdown()


def environment(port: int, key: str | None = KEY, *, rank: int = 0, size: int = 1) -> dict[str, str]:
    """Return the environment of a rank of a one-host job, which asks the rendezvous at this port."""
    variables = {k: v for k, v in os.environ.items() if k != proof.VARIABLE}
    variables |= {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **({proof.VARIABLE: key} if key is not None else {}),
    }
    local = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    return variables | {f"HOROVOD_{name}": str(value) for name, value in local.items()}
