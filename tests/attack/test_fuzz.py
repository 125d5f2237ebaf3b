"""Ten thousand requests of strangers at each service that listens: nothing ends, hangs or grows."""

from __future__ import annotations

import os
import random
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

pytest.importorskip("horovod.runner.common.util.proven_server", reason="no Horovod of this hvdtrain's is installed")
from horovod.runner.common.util import proof, wire

KEY = bytes(range(32))
REQUESTS = 10_000
SECONDS = 60
# Threads come and go, and an allocator keeps what it had.
MOST_GROWTH = 24 * 1024**2
SERVER = """
import sys, threading
from horovod.runner.common.util import network
from horovod.runner.http import http_server
key, name = bytes(range(32)), sys.argv[1]
if name == "wire":
    service = network.BasicService("service", key, {"lo"})
    port, counts = service.get_port(), service._server
elif name == "rendezvous":
    server = http_server.RendezvousServer(0, key)
    port = server.start(host="127.0.0.1")
    counts = server._httpd
else:
    server = http_server.KVStoreServer(0, key)
    port = server.start_server(host="127.0.0.1")
    counts = server.httpd
print(port, flush=True)
for _ in sys.stdin:
    print(counts.refused, threading.active_count(), flush=True)
"""


class Server:
    """A service in a process of its own."""

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        )  # fmt: skip
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def counts(self) -> list[int]:
        """Return how many requests it has refused, and how many threads it has."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return [int(word) for word in self.process.stdout.readline().split()]

    def memory(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def end(self) -> str:
        """End it and return what it said of errors."""
        alive = self.process.poll() is None
        _, said = self.process.communicate(timeout=20)
        assert alive, said
        return said


def http_request(dice: random.Random, key: bytes) -> bytes:
    body = dice.randbytes(dice.choice([0, 1, 100, 5000]))
    method, path = (
        dice.choice(["GET", "PUT", "DELETE", "HEAD", "POST", "FOO"]),
        dice.choice(["/a/b", "/a", "//", "/a/b/c"]),
    )
    headers = {**proof.request_headers(key, method, path, body), "Content-Length": str(len(body))}
    if dice.random() < 0.3:
        headers[dice.choice(list(headers))] = dice.choice(["", "-1", "9" * 40, "\xff", "0" * 64, "a" * 17_000])
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.{dice.randrange(3)}\r\n{lines}\r\n".encode("latin-1") + body


def wire_request(dice: random.Random, key: bytes) -> bytes:
    nonce, body = dice.randbytes(16), dice.randbytes(dice.choice([0, 1, 100, 5000]))
    length = dice.choice([len(body), 0, 2**63, dice.randrange(2**64)])
    head = struct.pack(">Q", length) + dice.randbytes(32)
    return nonce + head + wire.Wire(key)._proof(b"wire request", nonce, head) + body


def mutated(dice: random.Random, data: bytes) -> bytes:
    kind = dice.randrange(5)
    if kind == 0:
        return dice.randbytes(dice.choice([0, 1, 16, 88, 300, 20_000]))
    if kind == 1:
        return data[: dice.randrange(len(data) + 1)]
    if kind == 2:
        place = dice.randrange(len(data))
        return data[:place] + dice.randbytes(dice.randrange(1, 9)) + data[place:]
    if kind == 3:
        place = dice.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << dice.randrange(8)]) + data[place + 1 :]
    return data


def attack(port: int, requests: int, seed: int, made: Callable[[random.Random, bytes], bytes]) -> None:
    """Make requests, and wait for the answers of some."""
    dice = random.Random(seed)
    for _ in range(requests):
        # With another key, and now and then what one of the job's own sends, though changed.
        data = mutated(dice, made(dice, KEY if dice.random() < 0.1 else bytes(32)))
        try:
            with socket.create_connection(("127.0.0.1", port), 30) as connection:
                connection.sendall(data)
                if dice.random() < 0.5:
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1000)
        except TimeoutError:
            raise
        except OSError:  # it has hung up
            pass


@pytest.fixture
def quick() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rendezvous", "store", "wire"])
def test_a_service_stands_ten_thousand_strange_requests(name: str, quick: None) -> None:
    server = Server(name)
    made: Any = wire_request if name == "wire" else http_request
    seed = int(os.environ.get("HVDTRAIN_TEST_SEED", "1"))
    attack(server.port, REQUESTS // 10, seed, made)
    memory = server.memory()
    threads = [threading.Thread(target=attack, args=(server.port, REQUESTS // 4, seed + 1 + i, made)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    until = time.monotonic() + 15
    while server.counts()[1] > 2:  # the main one, and the one that accepts
        assert time.monotonic() < until, server.counts()
        time.sleep(0.1)
    assert server.counts()[0] > REQUESTS // 2
    assert server.memory() - memory < MOST_GROWTH
    said = server.end()
    assert said.count("refused a request from 127.0.0.1") == 1
    errors = [line for line in said.splitlines() if line.endswith("Error") or "Error: " in line]
    assert {line.partition(":")[0] for line in errors} <= {"KVStore ERROR"}, said[-3000:]
