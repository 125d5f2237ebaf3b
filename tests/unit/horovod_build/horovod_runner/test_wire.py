"""Services and their clients: nothing is read, let alone unpickled, of a message that is not proven."""

from __future__ import annotations

import io
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from horovod.runner.common.util import network, proven_server, wire

sys.path.insert(0, str(Path(__file__).parent))
from talking import eventually, said

KEY, OTHER = bytes(range(32)), bytes(32)
LOOPBACK = {
    name
    for name, found in psutil.net_if_addrs().items()
    if any(each.address == "127.0.0.1" for each in found if each.family == socket.AF_INET)
}


class Echo:
    def __init__(self, text: str) -> None:
        self.text = text


class Stream:
    pass


class Service(network.BasicService):
    def __init__(self, nics: Any = LOOPBACK) -> None:
        super().__init__("echo", KEY, nics)

    def _handle(self, req: Any, client_address: Any) -> Any:
        if isinstance(req, Echo):
            return Echo(req.text * 2)
        if isinstance(req, Stream):
            return network.AckStreamResponse(), io.StringIO("zwölf\n" * 100_000)
        return super()._handle(req, client_address)


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.shutdown()


def client(service: Service, key: bytes = KEY, **options: Any) -> network.BasicClient:
    return network.BasicClient("echo", service.addresses(), key, 0, **options)


def written(key: bytes, obj: Any) -> tuple[bytes, bytes]:
    """Return (nonce, message) of a request."""
    file = io.BytesIO()
    return wire.Wire(key).write_request(obj, file), file.getvalue()


def send(service: Service, data: bytes) -> bytes:
    return said(("127.0.0.1", service.get_port()), data)


def test_clients_with_the_key_are_answered(service: Service) -> None:
    there = client(service)
    assert there._send(Echo("a" * 1_000_000)).text == "a" * 2_000_000
    text = io.StringIO()
    assert isinstance(there._send(Stream(), text), network.AckStreamResponse)
    assert text.getvalue() == "zwölf\n" * 100_000
    assert service._server.refused == 0


def test_clients_with_another_key_are_not(service: Service) -> None:
    with pytest.raises(network.NoValidAddressesFound):
        client(service, OTHER, attempts=1)
    eventually(lambda: service._server.refused == 1)


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("place", ["head", "body"])
def test_nothing_is_unpickled_that_is_not_proven(place: str, service: Service, tmp_path: Any, capfd: Any) -> None:
    bomb = tmp_path / "exploded"
    if place == "head":
        data = written(OTHER, Bomb(str(bomb)))[1]
    else:
        good, bad = written(KEY, Echo("a"))[1], pickle.dumps(Bomb(str(bomb)))
        head = wire._NONCE_BYTES + wire._HEAD_BYTES
        data = good[:head] + bad.ljust(len(good) - head, b".")[: len(good) - head]
    for _ in range(2):
        assert send(service, data) == b""
    eventually(lambda: service._server.refused == 2)
    said = capfd.readouterr().err
    assert said.count("refused a request from 127.0.0.1") == 1
    assert "Traceback" not in said
    assert not bomb.exists()


@pytest.mark.parametrize("bytes_", [1, 15, 16, 50, 88, 100])
def test_garbage_and_hung_up_clients_are_nothing_to_speak_of(bytes_: int, service: Service, capfd: Any) -> None:
    for data in (os.urandom(bytes_), written(KEY, Echo("a" * 100))[1][:bytes_], b""):
        assert send(service, data) == b""
    assert client(service)._send(Echo("a")).text == "aa"
    assert "Traceback" not in capfd.readouterr().err


def test_a_repeated_request_is_refused(service: Service) -> None:
    _, data = written(KEY, Echo("a"))
    assert send(service, data) != b""
    assert send(service, data) == b""
    eventually(lambda: service._server.refused == 1)


def test_an_answer_belongs_to_its_request_and_goes_in_its_direction(service: Service) -> None:
    sides = wire.Wire(KEY)
    (nonce, data), (other, _) = written(KEY, Echo("a")), written(KEY, Echo("a"))
    answer = send(service, data)
    assert sides.read_answer(nonce, io.BytesIO(answer)).text == "aa"
    with pytest.raises(wire.NotProvenError):
        sides.read_answer(other, io.BytesIO(answer))
    with pytest.raises(wire.NotProvenError):
        sides.read_answer(nonce, io.BytesIO(data[wire._NONCE_BYTES :]))  # the request, sent back
    with pytest.raises(wire.NotProvenError, match="closed the connection"):
        sides.read_answer(nonce, io.BytesIO())


def test_too_long_a_message_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    nonce, data = written(KEY, Echo("a" * 100))
    monkeypatch.setattr(wire, "_MOST_BYTES", 50)
    sides = wire.Wire(KEY)
    file = io.BytesIO(data)
    with pytest.raises(wire.NotProvenError, match="too long"):
        sides.read_body(sides.read_request(file)[1], file)
    assert file.tell() == wire._NONCE_BYTES + wire._HEAD_BYTES
    assert nonce == data[: wire._NONCE_BYTES]


def test_whoever_is_silent_is_hung_up_on(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proven_server, "HEAD_LIMIT_S", 0.3)
    with socket.create_connection(("127.0.0.1", service.get_port()), 5) as slow:
        slow.sendall(b"abc")
        assert slow.recv(1) == b""
    eventually(lambda: service._server.refused == 1)


def test_shutdown_waits_for_answers_and_not_for_strangers() -> None:
    class Slow(Service):
        def _handle(self, req: Any, client_address: Any) -> Any:
            time.sleep(0.5 if isinstance(req, Echo) else 0)
            return super()._handle(req, client_address)

    slow = Slow()
    there, answers = client(slow), []
    asking = threading.Thread(target=lambda: answers.append(there._send(Echo("a")).text))
    asking.start()
    with socket.create_connection(("127.0.0.1", slow.get_port()), 5) as stranger:
        time.sleep(0.2)
        began = time.monotonic()
        slow.shutdown()
        assert time.monotonic() - began < 2
        assert stranger.recv(1) == b""
    asking.join()
    assert answers == ["aa"]


def test_a_service_of_one_interface_listens_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDTRAIN_LOOPBACK", "1")
    for nics in (LOOPBACK, next(iter(LOOPBACK))):
        made = Service(nics)
        assert made._server.server_address[0] == "127.0.0.1"
        made.shutdown()


def test_a_service_of_several_interfaces_takes_nothing_that_comes_by_others() -> None:
    made = proven_server.ProvenServer(("0.0.0.0", 0), lambda *_: pytest.fail("taken"), only_at=["10.1.2.3"])
    threading.Thread(target=made.serve_forever, daemon=True).start()
    with socket.create_connection(("127.0.0.1", made.server_address[1]), 5) as stranger:
        assert stranger.recv(1) == b""
    made.shutdown()
    made.server_close()
