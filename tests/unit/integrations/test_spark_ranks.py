"""The caller follows its ranks, with threads in place of Spark's tasks."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.errors import RankFailedError, UsageError
from hvdtrain.integrations.spark import driver, wire
from hvdtrain.integrations.spark.task import RankEnd
from hvdtrain.launch.exchange import Message
from hvdtrain.launch.exit_cause import Cause
from hvdtrain.launch.function_job import Outcome

Task = Callable[[Any, int], "RankEnd | None"]
CONTEXT = SimpleNamespace(
    getConf=dict, _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isLocal=lambda: True)), master="local[2]"
)  # fmt: skip


class Job:
    """Spark's part: two tasks, and the end of the job when both have ended."""

    def __init__(self, task: Task) -> None:
        self.ends: list[RankEnd] = []
        self.error: Exception | None = None
        self.cancelled = False
        self.end, self._write_end = os.pipe()
        self._task = task

    def start(self, plan: Any) -> None:
        def run(rank: int) -> None:
            connection = wire.connect(plan.address)
            end = self._task(SimpleNamespace(connection=connection, job=self), rank)
            self.ends += [end] if end else []
            connection.close()

        tasks = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for each in tasks:
            each.start()

        def finish() -> None:
            for each in tasks:
                each.join()
            os.write(self._write_end, b".")

        threading.Thread(target=finish).start()

    def cancel(self) -> None:
        self.cancelled = True

    def close(self, limit_s: float) -> None:
        os.close(self.end)
        os.close(self._write_end)


def here(task: Any, rank: int) -> None:
    wire.send(task.connection, kind="here", rank=rank, host="h")


def ended(task: Any, code: int, answer: str) -> None:
    wire.send(task.connection, kind="ended", code=code, seconds=1.0, answer=answer)


def follow(monkeypatch: pytest.MonkeyPatch, task: Task, *, limit_s: float = 60.0) -> Any:
    shown: list[Any] = []
    monkeypatch.setattr(driver, "SparkJob", lambda _: Job(task))
    found = driver.Ranks(CONTEXT, 2, show=shown.extend, deadline=time.monotonic() + limit_s, limit_s=limit_s)
    try:
        found.run(Message({}), {})
    finally:
        found.close()
    return found.own_problem() or found.outcome.problem() or (shown, found.outcome.answers)


def error(text: str, *, others: bool) -> Message:
    return Message(
        {"kind": "error", "what": "raised", "host": "h", "time": 1.0, "text": text, "others": others}
    )  # fmt: skip


@pytest.mark.parametrize("delay_s", [0.0, 0.5])
def test_lines_and_answers_of_all_ranks_come_back(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> None:
    """Also if tasks end before the caller's thread has handed over their connections."""
    prove = wire.TaskListener.prove
    monkeypatch.setattr(wire.TaskListener, "prove", lambda *args: (time.sleep(delay_s), prove(*args)))

    def task(task: Any, rank: int) -> RankEnd:
        here(task, rank)
        wire.send(task.connection, kind="lines", lines=[[rank, f"line of {rank}"]])
        ended(task, 0, "result")
        return RankEnd(rank, Message({"kind": "result"}, b"x"))

    shown, answers = follow(monkeypatch, task)
    assert sorted(shown) == [(0, "line of 0"), (1, "line of 1")]
    assert {rank: answer.pickled for rank, answer in answers.items()} == {0: b"x", 1: b"x"}


def test_a_killed_rank_is_the_cause_though_its_peers_error_was_heard_before(monkeypatch: pytest.MonkeyPatch) -> None:
    first = threading.Event()

    def task(task: Any, rank: int) -> RankEnd:
        here(task, rank)
        if rank == 0:
            ended(task, 1, "error")
            first.set()
            return RankEnd(0, error("connection closed by peer", others=True))
        first.wait(10)
        time.sleep(0.2)
        ended(task, 128 + signal.SIGKILL, "")
        return RankEnd(1, None)

    problem = follow(monkeypatch, task)
    assert isinstance(problem, RankFailedError)
    assert str(problem) == "rank 1 on host h was killed by signal 9 after 1 s, before the function had returned"
    assert problem.rank == 1


def test_a_rank_that_goes_on_after_anothers_failure_is_told_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(task: Any, rank: int) -> RankEnd:
        here(task, rank)
        if rank:
            ended(task, 1, "error")
            return RankEnd(1, error("boo", others=False))
        assert wire.receive(task.connection) == {"kind": "end"}
        ended(task, 128 + signal.SIGKILL, "")
        return RankEnd(0, None)

    problem = follow(monkeypatch, task)
    assert str(problem) == "rank 1 on host h raised:\nboo"


def test_a_rank_that_stops_later_than_another_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    both = threading.Barrier(2)

    def task(task: Any, rank: int) -> None:
        here(task, rank)
        both.wait(10)
        if not rank:
            time.sleep(0.2)  # the caller has heard both
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        heard.append(wire.receive(task.connection))
        time.sleep(2 * driver.LAST_WORDS_S * rank)
        if task.connection.poll():
            heard.append(wire.receive(task.connection))
        ended(task, 1, "")

    with pytest.raises(KeyboardInterrupt):
        follow(monkeypatch, task)
    assert heard == [{"kind": "stop"}] * 2


def test_a_lost_task_is_named_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(task: Any, rank: int) -> None:
        here(task, rank)
        if not rank:
            assert wire.receive(task.connection) == {"kind": "end"}
            task.job.error = RuntimeError("calling z.\n: ExecutorLostFailure")

    problem = follow(monkeypatch, task)
    assert isinstance(problem, RankFailedError)
    assert "rank 1 on host h was lost with its Spark task" in str(problem)


def test_ranks_that_do_not_start_or_cannot_are_told_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(task: Any, rank: int) -> None:
        assert wire.receive(task.connection) == {"kind": "end"}

    problem = follow(monkeypatch, late, limit_s=2.0)
    assert isinstance(problem, UsageError)
    assert "0 of 2 ranks had been started after 2 s" in str(problem)

    def refuses(task: Any, rank: int) -> None:
        if rank:
            wire.send(task.connection, kind="refused", text="on host h: Horovod is not installed")
        wire.receive(task.connection)

    problem = follow(monkeypatch, refuses)
    assert isinstance(problem, UsageError)
    assert str(problem) == "on host h: Horovod is not installed"


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (None, []),
        (Cause("rank 1 on host h", 0, 1), []),
        (Cause("rank 1 on host h", 139, 1),
         ["hvdtrain: rank 1 on host h was killed by signal 11, after the function had returned on every rank"]),
    ],
)  # fmt: skip
def test_a_failure_after_the_function_had_returned_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cause: Cause | None, said: list[str]
) -> None:
    answers = {rank: Message({"kind": "result"}, pickle.dumps((rank,))) for rank in range(2)}
    ranks = SimpleNamespace(
        outcome=Outcome(2, answers, cause), run=lambda *_: None, close=lambda: None, own_problem=lambda: None
    )
    monkeypatch.setattr(driver, "_context", lambda: CONTEXT)
    monkeypatch.setattr(driver, "_wait_for_slots", lambda *_: None)
    monkeypatch.setattr(driver.job_environment, "check_place", lambda _: None)
    monkeypatch.setattr(driver, "Ranks", lambda *_, **__: ranks)
    assert driver.run(print, np=2) == [0, 1]
    assert capsys.readouterr().out.splitlines() == said
