"""Strangers at the ports where ranks wait for each other: the job does not take them for ranks."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from gloo_ranks import KEY, environment, rendezvous

pytest.importorskip("horovod.torch", exc_type=ImportError)

# The last rank is late: the others listen for it, each on a port of its own.
RANK = """
import os, sys, time
import torch
import horovod.torch as hvd
print("imported", flush=True)
sys.stdin.readline()
hvd.init()
for step in range(3):
    total = hvd.allreduce(torch.full((1000,), float(hvd.rank() + 1)), op=hvd.Sum, name=f"step {step}")
weights = hvd.broadcast(torch.full((5,), float(hvd.rank())), root_rank=hvd.size() - 1)
print("sum", total.unique().tolist(), "weights", weights.unique().tolist(), flush=True)
"""
# Finds the ports as every user can, of all that listen those that the test names: other jobs may run here.
STRANGER = """
import hashlib, hmac, os, resource, socket, struct, sys, time

mode, allowed = sys.argv[1], set(map(int, sys.argv[2:]))
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
lines = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
listening = {int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A"}
ports = sorted(allowed & listening)
assert ports, (allowed, listening)

def hello(port):
    nonce = os.urandom(16)
    address = b"4" + struct.pack("!H", port) + socket.inet_aton("127.0.0.1")
    return nonce + hmac.new(bytes(32), b"gloo connect\\n" + address + nonce, hashlib.sha256).digest()

held = []
for port in ports:
    for _ in range(min(1500, limit // 4) if mode == "flood" else 5):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(("127.0.0.1", port))
        held.append((connection, port))
time.sleep(0.2)
for connection, port in held:
    try:
        if mode == "garbage":
            connection.send(os.urandom(4096))
        elif mode == "wrong key":
            connection.send(hello(port))
        elif mode == "rank":  # as Gloo's own connections once began: an operation, 48 bytes
            connection.send(struct.pack("6Q", 48, 3, 1, 0, 8, 0))
        elif mode == "gone":
            connection.close()
    except OSError:
        pass
print("attacked", len(ports), "ports", flush=True)
while mode == "storm":  # one after another, for as long as anybody listens
    for port in ports:
        held.append((socket.socket(), port))
        held[-1][0].setblocking(False)
        held[-1][0].connect_ex(("127.0.0.1", port))
    for connection, _ in held[:-200]:
        connection.close()
    del held[:-200]
time.sleep(600)
"""


def start_ranks(port: int, size: int) -> list[subprocess.Popen[str]]:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=environment(port, KEY, rank=rank, size=size),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    for rank in ranks:
        assert rank.stdout
        assert rank.stdout.readline() == "imported\n"
    return ranks


def let_go(rank: subprocess.Popen[str]) -> None:
    assert rank.stdin
    rank.stdin.write("go\n")
    rank.stdin.flush()


def listening(rank: subprocess.Popen[str]) -> set[int]:
    process = psutil.Process(rank.pid)
    connections = getattr(process, "net_connections", None) or process.connections
    return {c.laddr.port for c in connections(kind="tcp") if c.status == psutil.CONN_LISTEN}


def wait_for_ports(ranks: list[subprocess.Popen[str]]) -> list[int]:
    """Return where these ranks listen when they wait for the last one alone: one port each."""
    # Ranks that still connect to each other have one for a moment, too, and one may get a number that another one had.
    ends, before = time.monotonic() + 20, []
    while time.monotonic() < ends:
        ports = [listening(rank) for rank in ranks]
        if ports == before and all(len(each) == 1 for each in ports):
            return [port for each in ports for port in each]
        before = ports
        time.sleep(0.2)
    raise AssertionError(f"ranks listen at {ports}")


def attacked_job(stranger: Any, mode: str, size: int = 4) -> list[tuple[str, str]]:
    """Run a job of which all ranks but the last are attacked while they wait for it; return what each rank said."""
    with rendezvous(key=bytes.fromhex(KEY)) as (port, _):
        ranks = start_ranks(port, size)
        intruder = None
        try:
            for rank in ranks[:-1]:
                let_go(rank)
            intruder = stranger.start(STRANGER, mode, *wait_for_ports(ranks[:-1]))
            assert select.select([intruder.stdout], [], [], 30)[0]
            assert intruder.stdout.readline() == f"attacked {size - 1} ports\n"
            let_go(ranks[-1])
            return [rank.communicate(timeout=60) for rank in ranks]
        finally:
            for process in [*ranks, *filter(None, [intruder])]:
                process.kill()
                process.communicate()


@pytest.mark.parametrize("mode", ["silent", "garbage", "rank", "wrong key", "gone", "flood", "storm"])
def test_a_stranger_who_connects_first_is_not_taken_for_a_rank(stranger: Any, mode: str) -> None:
    said = attacked_job(stranger, mode)
    assert [out for out, _ in said] == ["sum [10.0] weights [3.0]\n"] * 4, said


def test_a_rank_reports_the_first_stranger_alone(stranger: Any) -> None:
    # Which rank of two accepts the other is a matter of port numbers: in one job of eight it is always the last one.
    for _ in range(5):
        said = [errors for _, errors in attacked_job(stranger, "wrong key")]
        counts = [errors.count("did not prove to be from this job, and was refused") for errors in said]
        assert max(counts) <= 1
        if any(counts):
            assert "A connection from [127.0.0.1]:" in said[counts.index(1)]
            return
    raise AssertionError(f"no rank reported a stranger: {said}")
