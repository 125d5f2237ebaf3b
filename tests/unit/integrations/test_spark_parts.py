"""The parts that need no Spark: places of ranks, proofs of identity, imports."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

import hvdtrain
from hvdtrain.errors import PackageMissingError
from hvdtrain.integrations import spark
from hvdtrain.integrations.spark import wire
from hvdtrain.integrations.spark.driver import SparkJob
from hvdtrain.integrations.spark.task import Place, rank_order, visible_gpus


def test_ranks_of_a_host_stand_together_with_the_first_partitions_host_first() -> None:
    assert rank_order(["b", "a", "b", "c", "a"]) == [0, 2, 1, 4, 3]
    assert rank_order(["a"]) == [0]


def test_a_rank_sees_the_gpus_of_its_hosts_ranks_by_local_rank_and_nothing_is_set_without() -> None:
    places = [Place("a", "10.0.0.1", ["3", "1"]), Place("a", "10.0.0.1", ["0"]), Place("b", "10.0.0.2", [])]
    assert visible_gpus(0, places) == visible_gpus(1, places) == {"CUDA_VISIBLE_DEVICES": "3,0"}
    assert visible_gpus(2, places) == {}


def let_in(listener: wire.TaskListener, *, limit_s: float = 60) -> Connection | None:
    """Do what the caller's loop does, until somebody has proven itself."""
    return listener.take() if wait(listener.sources(), timeout=limit_s) else None


@pytest.fixture
def listener() -> Iterator[wire.TaskListener]:
    found = wire.TaskListener("127.0.0.1", "127.0.0.1")
    yield found
    found.close()


def reach(listener: wire.TaskListener) -> socket.socket:
    return socket.create_connection((listener.address.host, listener.address.port))


def connect_in_a_thread(listener: wire.TaskListener, key: bytes | None = None) -> tuple[threading.Thread, list[Any]]:
    """Connect as a task does; the list gets the connection, or the error."""
    ends: list[Any] = []

    def connect_here() -> None:
        try:
            ends.append(
                wire.connect(wire.Address(listener.address.host, listener.address.port, key or listener.address.key))
            )
        except (multiprocessing.AuthenticationError, OSError) as error:
            ends.append(error)

    thread = threading.Thread(target=connect_here)
    thread.start()
    return thread, ends


def a_task_connects(listener: wire.TaskListener) -> tuple[Connection, Connection]:
    """Return both sides' connections of a task that has proven itself: the caller's, and the task's."""
    thread, ends = connect_in_a_thread(listener)
    mine = let_in(listener)
    thread.join()
    assert mine is not None, ends
    return mine, ends[0]


def refusals(listener: wire.TaskListener, number: int) -> int:
    """Wait until so many were refused; return how many were."""
    until = time.monotonic() + 30
    while listener.refused < number and time.monotonic() < until:
        assert let_in(listener, limit_s=0.1) is None
    return listener.refused


def test_who_has_another_key_is_refused_and_named_once(
    listener: wire.TaskListener, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        thread, ends = connect_in_a_thread(listener, b"x" * 32)
        thread.join()
        assert isinstance(ends[0], OSError)
    assert refusals(listener, 2) >= 2
    assert [record.getMessage() for record in caplog.records] == [
        "refused a connection from 127.0.0.1, which has no proof; the job is not affected"
    ]


def test_strangers_who_say_nothing_hold_up_nobody_and_go_after_their_time(
    listener: wire.TaskListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [reach(listener) for _ in range(10)]
    monkeypatch.setattr(wire.time, "sleep", lambda seconds: pytest.fail("the task had to connect again"))
    mine, theirs = a_task_connects(listener)
    mine.close()
    theirs.close()
    assert listener.refused == 0
    monkeypatch.setattr(wire.proven_server.time, "monotonic", lambda: float("inf"))
    for each in silent:
        each.settimeout(30)
        while each.recv(100):  # the challenge, then the end
            pass
        each.close()
    monkeypatch.undo()
    assert refusals(listener, 10) == 10


@pytest.mark.parametrize(
    "said", [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff" + b"x" * 100, b"GET / HTTP/1.1", b"\0\0\0\x41"]
)
def test_what_is_no_proof_ends_the_connection_before_it_is_read(
    listener: wire.TaskListener, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire.proven_server, "HEAD_LIMIT_S", 1.0)
    with reach(listener) as stranger:
        stranger.sendall(said)
        assert refusals(listener, 1) == 1
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(100):
                pass


def test_a_crowd_of_strangers_is_bounded_and_a_task_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire.proven_server, "_MOST_UNPROVEN", 1)  # 16 all the same
    listener = wire.TaskListener("127.0.0.1", "127.0.0.1")
    crowd = [reach(listener) for _ in range(40)]
    mine, theirs = a_task_connects(listener)
    assert refusals(listener, 24) >= 24
    for each in (mine, theirs, *crowd):
        each.close()
    listener.close()


def test_a_task_that_is_hung_up_on_while_it_connects_tries_again(
    listener: wire.TaskListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, tries = wire.Client, [ConnectionResetError(), BrokenPipeError(), TimeoutError()]

    def connect(*args: Any, **options: Any) -> Connection:
        if tries:
            raise tries.pop()
        return client(*args, **options)

    monkeypatch.setattr(wire, "Client", connect)
    mine, theirs = a_task_connects(listener)
    mine.close()
    theirs.close()


def test_both_sides_hear_each_other_and_an_end(listener: wire.TaskListener) -> None:
    mine, theirs = a_task_connects(listener)
    wire.send(mine, kind="stop")
    assert wire.receive(theirs) == {"kind": "stop"}
    wire.send(theirs, kind="lines", lines=["x" * 1_000_000])
    heard = wire.receive(mine)
    assert heard is not None
    assert len(heard["lines"][0]) == 1_000_000
    assert wire.own_address(mine) == "127.0.0.1"
    theirs.close()
    assert wire.receive(mine) is None
    mine.close()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("calling z.\n: o.a.SparkException: Job aborted\nat x", "o.a.SparkException: Job aborted"),
        ("calling z.\n: o.a.SparkException: x\nTraceback\nModuleNotFoundError: No module named 'hvdtrain'\n at y",
         "ModuleNotFoundError: No module named 'hvdtrain'"),
        ("plain", "plain"),
    ],
)  # fmt: skip
def test_of_sparks_stacks_the_line_is_told_that_says_what_is_wrong(text: str, line: str) -> None:
    job = SparkJob(context=None)
    job.error = RuntimeError(text)
    job.close(0)
    assert job.reason() == line


def test_neither_pyspark_nor_horovod_nor_pyarrow_is_imported_before_it_is_used() -> None:
    code = (
        "import hvdtrain, sys; from hvdtrain.integrations import spark; hvdtrain.read_parquet; "
        "print([name for name in ('pyspark', 'horovod', 'pyarrow', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_packages_are_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyspark", "pyspark.sql", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PackageMissingError, match=r"PySpark is not installed\. Run: pip install pyspark pyarrow"):
        spark.run(print, np=2)
    with pytest.raises(PackageMissingError, match="pip install pyspark pyarrow"):
        spark.write_parquet(None, "somewhere")
    with pytest.raises(PackageMissingError, match=r"pyarrow is not installed\. Run: pip install pyarrow"):
        hvdtrain.read_parquet("somewhere")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"np": 0}, ValueError, "np, the number of ranks"),
        ({"np": 2, "output": "some"}, ValueError, 'output must be "all" or "root"'),
        ({"np": 2, "start_timeout_s": 0}, ValueError, "start_timeout_s must be > 0"),
        ({"np": 2, "args": "x"}, TypeError, "args must be a tuple"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_before_anything_is_started(
    arguments: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        spark.run(print, **arguments)
