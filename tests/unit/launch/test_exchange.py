"""Nobody but the ranks of a call gets its function, and nobody but its caller is believed."""

from __future__ import annotations

import gc
import hashlib
import hmac
import os
import pickle
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path

import pytest

from hvdtrain.launch import exchange
from hvdtrain.launch.exchange import Message
from hvdtrain.launch.function_job import TaskServer

TASK = Message({"path": ["/a"]}, b"function")


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[TaskServer]:
    made = TaskServer(tmp_path, TASK, size=2)
    yield made
    made.close()


class Rank(threading.Thread):
    """Asks for the task as a rank does; keeps what it got."""

    def __init__(self, rank: int, environment: dict[str, str], answer: Message | None) -> None:
        super().__init__(daemon=True)
        self.rank, self.environment, self.answer = rank, environment, answer
        self.task: Message | None = None
        self.problem: BaseException | None = None

    def run(self) -> None:
        try:
            os.environ.update(self.environment)
            self.task, connection = exchange.request_task(self.rank)
            if self.answer is not None:
                self.answer.send(connection)
            connection.close()
        except BaseException as problem:
            self.problem = problem


def serve(caller: TaskServer, rank: threading.Thread) -> None:
    """Run the caller's side until `rank` has ended."""
    while rank.is_alive():
        for ready in wait(caller.sources(), timeout=0.05):
            caller.take(ready)
    rank.join()
    caller.drain()


def test_a_rank_gets_the_task_and_its_answer_comes_back_whole(caller: TaskServer) -> None:
    answer = Message({"kind": "result"}, os.urandom(5 * 2**20))
    rank = Rank(3, caller.environment, answer)
    rank.start()
    serve(caller, rank)
    assert rank.task == TASK
    assert caller.answers == {3: answer}
    assert not {name for name in os.environ if name.startswith("HVDTRAIN_CALL")}  # nothing below inherits the key


def test_a_machine_that_refuses_md5_is_no_obstacle(caller: TaskServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("[digital envelope routines] unsupported")

    new = hmac.new
    monkeypatch.setattr(hashlib, "md5", refuse)
    monkeypatch.setattr(hmac, "new", lambda key, text, kind: refuse() if kind == "md5" else new(key, text, kind))
    rank = Rank(0, caller.environment, None)
    rank.start()
    serve(caller, rank)
    assert rank.task == TASK


def test_a_stranger_without_the_key_gets_nothing_and_is_not_heard(caller: TaskServer) -> None:
    wrong = {name: "00" * 32 if name.endswith("KEY") else text for name, text in caller.environment.items()}
    stranger = Rank(0, wrong, Message({"kind": "result"}, pickle.dumps("evil")))
    stranger.start()
    serve(caller, stranger)
    assert isinstance(stranger.problem, EOFError)  # it was hung up on
    assert stranger.task is None
    assert caller.answers == {}
    rank = Rank(1, caller.environment, Message({"kind": "result"}))  # whom a stranger does not disturb
    rank.start()
    serve(caller, rank)
    assert list(caller.answers) == [1]


def test_a_rank_takes_no_function_from_whoever_lacks_the_key(tmp_path: Path) -> None:
    address = str(tmp_path / "call")
    with Listener(address, family="AF_UNIX") as impostor:
        environment = {"HVDTRAIN_CALL_SOCKET": address, "HVDTRAIN_CALL_KEY": "11" * 32}
        rank = Rank(0, environment, None)
        rank.start()
        with impostor.accept() as connection:
            connection.send_bytes(os.urandom(32))
            connection.send_bytes(connection.recv_bytes()[32:])  # the rank's own proof is none of the caller's
            rank.join(30)
    assert isinstance(rank.problem, AuthenticationError)
    assert rank.task is None


def test_a_rank_that_dies_in_the_midst_of_its_answer_has_given_none(caller: TaskServer) -> None:
    class Dying(Rank):
        def run(self) -> None:
            environment = caller.environment
            key = bytes.fromhex(environment["HVDTRAIN_CALL_KEY"])
            with Client(environment["HVDTRAIN_CALL_SOCKET"], family="AF_UNIX") as connection:
                exchange.prove_rank(connection, key)
                connection.send_bytes(b'{"rank": 0}')
                Message.receive(connection)
                connection.send_bytes(b'{"kind": "result"}')
                os.write(connection.fileno(), b"\0\0\1\0half")

    rank = Dying(0, {}, None)
    rank.start()
    serve(caller, rank)
    assert caller.answers == {}
    assert not [source for source in caller.sources() if isinstance(source, Connection)]


def test_once_all_ranks_are_there_nobody_else_is_let_in(caller: TaskServer) -> None:
    ranks = [Rank(number, caller.environment, None) for number in (0, 1, 2)]
    for rank in ranks:
        rank.start()
        serve(caller, rank)
    assert [rank.task for rank in ranks] == [TASK, TASK, None]
    assert isinstance(ranks[2].problem, OSError)


def test_after_the_end_nobody_is_let_in(caller: TaskServer) -> None:
    caller.close()
    assert caller.sources() == []
    rank = Rank(0, caller.environment, None)
    rank.start()
    rank.join(30)
    assert isinstance(rank.problem, OSError)


def test_a_socket_that_cannot_be_made_is_closed(tmp_path: Path) -> None:
    gc.collect()  # what earlier tests left open may close at any time
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="too long") as info:
        TaskServer(tmp_path / ("x" * 200), TASK, size=1)
    assert set(os.listdir("/proc/self/fd")) <= before
    del info
