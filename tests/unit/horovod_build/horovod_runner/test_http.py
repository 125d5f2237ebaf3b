"""The rendezvous and the key-value store: who may ask, and what happens to others."""

from __future__ import annotations

import contextlib
import http.client
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from horovod.runner.common.util import proof, proven_server
from horovod.runner.http import http_client, http_server

sys.path.insert(0, str(Path(__file__).parent))
from talking import eventually, said

KEY = bytes(range(32))
HERE = "127.0.0.1"


@pytest.fixture(params=["rendezvous", "store"])
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server, as the object that counts what it refuses."""
    if request.param == "store":
        store = http_server.KVStoreServer(0, KEY)
        store.start_server(host=HERE)
        yield store.httpd
        store.shutdown_server()
    else:
        meeting = http_server.RendezvousServer(0, KEY)
        meeting.start(host=HERE)
        yield meeting._httpd
        meeting.stop()


def send(server: Any, data: bytes) -> bytes:
    return said(server.server_address, data)


def request(method: str, path: str, body: bytes = b"", *, key: bytes = KEY, length: str = "") -> bytes:
    headers = {**proof.request_headers(key, method, path, body), "Content-Length": length or str(len(body))}
    lines = "".join(f"{name}: {text}\r\n" for name, text in headers.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


def status(answer: bytes) -> int:
    return int(answer.split()[1])


def test_what_is_put_can_be_read_by_those_with_the_key(server: Any) -> None:
    port = server.server_address[1]
    http_client.put_data_into_kvstore(HERE, port, "scope", "key", {"a": [1, 2]}, KEY)
    assert http_client.read_data_from_kvstore(HERE, port, "scope", "key", KEY) == {"a": [1, 2]}
    assert server.refused == 0


def test_a_server_without_a_key_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(proof.VARIABLE, raising=False)
    for kind in (http_server.RendezvousServer, http_server.KVStoreServer):
        with pytest.raises(RuntimeError, match="HVDTRAIN_JOB_KEY"):
            kind(0)


@pytest.mark.parametrize(
    "data",
    [
        request("PUT", "/scope/key", b"theirs", key=bytes(32)),
        request("GET", "/scope/key", key=bytes(32)),
        b"GET /scope/key HTTP/1.0\r\n\r\n",
        b"GET /scope/key\r\n\r\n",
        b"HEAD /etc/passwd HTTP/1.0\r\n\r\n",
        request("HEAD", "/scope/key"),
        request("POST", "/scope/key", b"x"),
        request("GET", "/scope"),
        request("GET", "/scope/key/"),
        request("GET", "/scope/a/b"),
        request("PUT", "/scope/key", b"theirs", length="-1"),
        request("PUT", "/scope/key", b"theirs", length="1" * 30),
        request("PUT", "/scope/key", b"their").replace(b"their", b"other"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET " + b"/" * 20_000 + b" HTTP/1.0\r\n\r\n",
        b"GET /a/b HTTP/1.0\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
        b"GET /a/b HTTP/\xc2\xb2.1\r\n\r\n",
    ],
)
def test_whoever_has_not_the_key_is_refused_and_counted(server: Any, data: bytes, capfd: pytest.CaptureFixture) -> None:
    port = server.server_address[1]
    http_client.put_data_into_kvstore(HERE, port, "scope", "key", "ours", KEY)
    for _ in range(2):
        answer = send(server, data)
        assert answer == b"" or (status(answer) == 403 and b"ours" not in answer)
    eventually(lambda: server.refused == 2)
    assert capfd.readouterr().err.count("refused a request from 127.0.0.1 that was not made with this job's key") == 1
    assert http_client.read_data_from_kvstore(HERE, port, "scope", "key", KEY) == "ours"


def test_a_request_that_somebody_has_heard_and_repeats_is_refused(server: Any) -> None:
    first, second = request("PUT", "/scope/key", b"old"), request("PUT", "/scope/key", b"new")
    assert [status(send(server, data)) for data in (first, second, first)] == [200, 200, 403]
    read = request("GET", "/scope/key")
    answers = [send(server, read) for _ in range(2)]
    assert [status(answer) for answer in answers] == [200, 403]
    assert answers[0].endswith(b"new")
    assert b"new" not in answers[1]


def test_nothing_is_unpickled_that_the_server_has_not_proven() -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return pytest.fail, ("unpickled",)

    with socket.create_server((HERE, 0)) as impostor:

        def answer() -> None:
            body = __import__("base64").b64encode(pickle.dumps(Bomb()))
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = impostor.accept()
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                    connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(RuntimeError, match="Read data from KVStore server failed") as info:
            http_client.read_data_from_kvstore(HERE, impostor.getsockname()[1], "scope", "key", KEY)
        assert "was not made with this job's key" in str(info.value.__cause__)


def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "TIMEOUT_S", 0.1)
    with socket.create_server((HERE, 0)) as silent, pytest.raises(RuntimeError):
        http_client.read_data_from_kvstore(HERE, silent.getsockname()[1], "scope", "key", KEY)


def test_bytes_that_trickle_do_not_hold_a_connection(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proven_server, "HEAD_LIMIT_S", 1.0)
    began = time.monotonic()
    with socket.create_connection(server.server_address, 5) as slow, contextlib.suppress(OSError):
        while time.monotonic() - began < 10:
            slow.sendall(b"G")
            time.sleep(0.1)
    assert time.monotonic() - began < 5
    eventually(lambda: server.refused == 1)


def test_silent_strangers_give_way_to_the_jobs_own(server: Any) -> None:
    server._most, threads = 32, threading.active_count()
    silent: list[socket.socket] = []
    try:
        for _ in range(server._most + 30):
            silent.append(socket.create_connection(server.server_address, 5))
        port = server.server_address[1]
        http_client.put_data_into_kvstore(HERE, port, "scope", "key", "ours", KEY)
        eventually(lambda: threading.active_count() - threads <= server._most)
        assert silent[0].recv(1) in (b"", b"H")  # the oldest has gone
    finally:
        for connection in silent:
            connection.close()
    eventually(lambda: threading.active_count() <= threads)


def test_a_rank_that_dies_in_the_midst_of_a_body_changes_nothing(server: Any, capfd: pytest.CaptureFixture) -> None:
    assert send(server, request("PUT", "/scope/key", b"ours")[:-2]).startswith(b"HTTP/1.0 403")
    with pytest.raises(RuntimeError):
        http_client.read_data_from_kvstore(HERE, server.server_address[1], "scope", "key", KEY)
    assert "Traceback" not in capfd.readouterr().err


def test_too_long_a_body_is_not_read(server: Any) -> None:
    server.body_limit = 3
    assert status(send(server, request("PUT", "/scope/key", b"long"))) == http_server.BAD_REQUEST


def started_rendezvous() -> Any:
    """Return a rendezvous server for two ranks on one host, which listens."""

    class Slot:
        hostname, size, local_size, cross_size, local_rank = "here", 2, 2, 1, 0

    meeting = http_server.RendezvousServer(0, KEY)
    meeting.start(host=HERE)
    meeting.init([Slot()])
    return meeting


def test_scopes_are_dropped_when_all_their_ranks_are_through() -> None:
    meeting = started_rendezvous()
    server = meeting._httpd
    assert status(send(server, request("PUT", "/global/0", b"address"))) == 200
    for rank in ("0", "1"):
        assert server.cache["global"]
        assert status(send(server, request("DELETE", f"/global/{rank}"))) == 200
    assert not server.cache["global"]
    meeting.stop()
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(*server.server_address, timeout=1).connect()


def test_a_scope_is_dropped_whatever_other_scopes_are_through() -> None:
    meeting = started_rendezvous()
    server = meeting._httpd
    for name in ("local_here", "cross_0"):
        assert status(send(server, request("PUT", f"/{name}/0", b"address"))) == 200
    # Rank 0 is through with both scopes before rank 1 is with the first; it repeats a request whose answer is lost.
    for path in ("/local_here/0", "/local_here/0", "/cross_0/0", "/local_here/1"):
        assert server.cache["local_here"]
        assert status(send(server, request("DELETE", path))) == 200
    assert not server.cache["cross_0"]
    assert not server.cache["local_here"], "the next hvd.init would connect to an address of this one"
    meeting.stop()


def test_nonces_are_remembered_up_to_a_limit() -> None:
    nonces = proven_server.Nonces(3)
    assert [nonces.is_new(each) for each in (b"a", b"b", b"a", b"c", b"d")] == [True, True, False, True, True]
    assert len(nonces._known) == 3
    assert nonces.is_new(b"a")  # forgotten
    assert not nonces.is_new(b"d")
