"""A rank's own requests to the rendezvous, which C++ makes: proven, and believed only if the answer is."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hvdtrain.horovod_build import edits

pytest.importorskip("horovod.torch", exc_type=ImportError)
sys.path.insert(0, str(edits.ADDED / "horovod/runner/common/util"))
import proof

KEY = "5b" * 32
RANK = "import horovod.torch as hvd; hvd.init(); print('ranks:', hvd.size())"


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


@contextmanager
def rendezvous(**answers: object) -> Iterator[tuple[int, type[Rendezvous]]]:
    handler = type("Handler", (Rendezvous,), {"store": {}, "unproven": [], "requests": 0, **answers})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], handler
        server.shutdown()


def environment(port: int, key: str | None = KEY) -> dict[str, str]:
    """Return the environment of a job's only rank, which asks the rendezvous at this port."""
    variables = {k: v for k, v in os.environ.items() if k != proof.VARIABLE}
    variables |= {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **({proof.VARIABLE: key} if key is not None else {}),
    }
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    return variables | {f"HOROVOD_{name}": "1" if name.endswith("SIZE") else "0" for name in names}


def rank(port: int, key: str | None = KEY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RANK],
        env=environment(port, key),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_every_request_of_a_rank_is_proven() -> None:
    with rendezvous(key=bytes.fromhex(KEY)) as (port, seen):
        done = rank(port)
    assert done.returncode == 0, done.stderr
    assert "ranks: 1" in done.stdout
    assert seen.requests >= 6
    assert seen.unproven == []


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["no key", "another key"])
def test_an_answer_that_is_not_the_jobs_is_not_believed(key: bytes | None) -> None:
    with rendezvous(key=key) as (port, _):
        done = rank(port)
    assert done.returncode != 0
    assert f"the answer of the rendezvous at 127.0.0.1:{port} was not made with this job's key" in done.stderr


@pytest.mark.parametrize(
    ("key", "reason"),
    [(KEY, "its HVDTRAIN_JOB_KEY is not this job's"), (None, "it has no HVDTRAIN_JOB_KEY")],
    ids=["another key", "no key"],
)
def test_a_rank_that_is_refused_ends_at_its_first_request(key: str | None, reason: str) -> None:
    with rendezvous(status=403) as (port, seen):
        done = rank(port, key)
    assert done.returncode != 0
    assert f"refused this process (403): {reason}" in done.stderr
    assert seen.requests == 1


def test_a_rank_without_a_key_asks_as_it_always_did() -> None:
    with rendezvous() as (port, seen):
        done = rank(port, key=None)
    assert done.returncode == 0, done.stderr
    assert len(seen.unproven) == seen.requests


def test_a_key_that_is_none_is_named() -> None:
    done = rank(1, key="secret")
    assert done.returncode != 0
    assert "HVDTRAIN_JOB_KEY must be 64 hex digits" in done.stderr
    assert "secret" not in done.stderr


@pytest.mark.slow
def test_a_rank_does_not_wait_for_ever_for_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        variables = environment(port) | {"HOROVOD_LOG_LEVEL": "debug"}
        with subprocess.Popen(
            [sys.executable, "-c", RANK], env=variables, stdout=subprocess.PIPE, text=True
        ) as process:
            # The first of three tries is enough to see.
            said = next((line for line in process.stdout or () if "Exception" in line), "")
            process.kill()
    assert f"No answer from 127.0.0.1:{port} within 30 s" in said
