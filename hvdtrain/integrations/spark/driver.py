"""`hvdtrain.integrations.spark.run`: a function on several ranks, each a task of one Spark job."""

from __future__ import annotations

import functools
import importlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeVar

from hvdtrain.errors import RankFailedError, UsageError
from hvdtrain.horovod_build.shared import proof
from hvdtrain.integrations import rendezvous
from hvdtrain.integrations.spark import wire
from hvdtrain.integrations.spark.table import pyspark
from hvdtrain.integrations.spark.task import RankEnd, TaskPlan, run_rank
from hvdtrain.launch import function, job_environment
from hvdtrain.launch.exchange import Message
from hvdtrain.launch.exit_cause import LAST_WORDS_S, Cause
from hvdtrain.launch.function_job import GRACE_S, Outcome, until_ended
from hvdtrain.launch.rank_output import Line
from hvdtrain.system import network
from hvdtrain.system.settings import EXIT_STOPPED

T = TypeVar("T")

_PASSED_ON = ("HVDTRAIN_", "HOROVOD_", "KERAS_BACKEND")  # from the caller's environment; executors have their own

_END_S = 30.0  # how long to wait for an end that was requested
_POLL_S = 1.0
_RESULTS_S = 600.0  # how long Spark may take to deliver what ranks returned


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int,
    output: Literal["all", "root"] = "all",
    environment: Mapping[str, str] | None = None,
    start_timeout_s: float = 120.0,
) -> list[T]:
    """Call `fn(*args, **kwargs)` on `np` new ranks, one per Spark task, and return what each returned, in rank order.

    This is `hvdtrain.run` on the executors of the active SparkSession. What ranks print appears here at once. An
    interrupt (Ctrl-C) asks the ranks to stop and gives them 30 s to write a checkpoint; a second one ends them at once.
    All ranks start together, or none (Spark's barrier mode), so dynamic allocation must be off. hvdtrain and its
    Horovod must be installed on the executors. Ranks use Gloo, or NCCL if Horovod was built with it.

    Args:
        fn: what to call. Its data should be loaded in it, on each rank: arguments are copied to all of them.
        args: its positional arguments.
        kwargs: its keyword arguments.
        np: number of ranks.
        output: "all" shows every rank's lines, behind "[rank] "; "root" shows rank 0's as they are.
        environment: variables for ranks, besides their executor's, and this process's HVDTRAIN_*, HOROVOD_* and
            KERAS_BACKEND.
        start_timeout_s: how long to wait for executors, and for task slots that other jobs use.

    Raises:
        TypeError: `fn` cannot be called, or an argument or a returned value cannot be pickled.
        ValueError: np or output is out of range; the cluster has fewer task slots than np.
        UsageError: there is no SparkSession, or no ranks can be started.
        PackageMissingError: PySpark is not installed.
        RankFailedError: a rank was killed, lost with its executor, or ended without a result. It is also the cause
            (`__cause__`) of an exception that `fn` raised on a rank; that exception is raised here unchanged.
    """
    function.check_call(fn, args, np, output)
    if not start_timeout_s > 0:
        raise ValueError(f"start_timeout_s must be > 0. Received: start_timeout_s={start_timeout_s!r}")
    context = _context()
    job_environment.check_place("hvdtrain.integrations.spark.run")
    deadline = time.monotonic() + start_timeout_s
    _wait_for_slots(context, np, deadline, start_timeout_s)
    task = function.make_task(fn, args, kwargs)
    chosen = rendezvous.environment(function.name_of(fn), environment or {}, passed=_PASSED_ON)
    chosen[proof.VARIABLE] = proof.new_key()
    show = functools.partial(function.show_lines, output=output)
    ranks = Ranks(context, np, show=show, deadline=deadline, limit_s=start_timeout_s)
    try:
        with _plain_interrupts():
            ranks.run(task, chosen)
    finally:
        ranks.close()
    if (problem := ranks.own_problem()) is not None:
        raise problem
    values, cause = ranks.outcome.values(root_only=output == "root"), ranks.outcome.cause
    if cause is not None and cause.code:
        show([(None, f"hvdtrain: {cause}, after the function had returned on every rank")])
    return values


def _context() -> Any:
    context = pyspark("pyspark").SparkContext._active_spark_context
    if context is None:
        raise UsageError(
            "no SparkSession is active in this process. Call SparkSession.builder.getOrCreate() first. A session of "
            "Spark Connect does not work: it has no barrier jobs, which hvdtrain needs"
        )
    return context


def _wait_for_slots(context: Any, np: int, deadline: float, limit_s: float) -> None:
    """Wait until executors have room for all ranks; raise a ValueError where they do not get it."""
    spark = context._jsc.sc()
    local = bool(spark.isLocal())
    profile = spark.resourceProfileManager().resourceProfileFromId(0)
    while (there := int(spark.maxNumConcurrentTasks(profile))) < np:
        if local or time.monotonic() > deadline:
            waited = "" if local else f", also after {limit_s:g} s"
            more = f'master("local[{np}]")' if local else "more executors or cores, or a smaller spark.task.cpus"
            raise ValueError(
                f"each rank needs a task slot, and Spark ({context.master}) has {there}{waited}. Received: np={np}. "
                f"Use fewer ranks, or {more}"
            )
        time.sleep(0.5)


@contextmanager
def _plain_interrupts() -> Iterator[None]:
    """Make Ctrl-C a KeyboardInterrupt alone: PySpark's own handler would end all jobs before ranks could stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class SparkJob:
    """One Spark job with a task for each rank. Spark starts all tasks together, and does not retry a failed one."""

    def __init__(self, context: Any) -> None:
        self.ends: list[RankEnd] = []  # how the ranks ended
        self.error: Exception | None = None  # why the job failed
        self.end, self._write_end = os.pipe()  # can be read once the job has ended
        self._context = context
        self._group = f"hvdtrain-{secrets.token_hex(4)}"
        self._thread: Any = None

    def start(self, plan: TaskPlan) -> None:
        """Start it, in a separate thread."""
        thread = importlib.import_module("pyspark").InheritableThread
        self._thread = thread(target=self._run, args=(plan,), daemon=True, name=self._group)
        self._thread.start()

    def cancel(self) -> None:
        """Let Spark end the job's tasks. Tasks that start later are missed: call it again until the job has ended."""
        self._context.cancelJobGroup(self._group)

    def close(self, limit_s: float) -> None:
        """Wait for its end, which was noticed or requested."""
        if self._thread is not None:
            self._thread.join(limit_s)
        if self._thread is None or not self._thread.is_alive():
            os.close(self.end)
            os.close(self._write_end)

    def reason(self) -> str:
        """Return one line that says why it failed."""
        lines = [line.strip() for line in str(self.error).splitlines()]
        # The last line of a task's traceback; else the first line that is not py4j's.
        own = [line for line in lines if ": " in line and line.split(": ")[0].rpartition(".")[2].endswith("Error")]
        spark = [line for line in lines if line.startswith(": ")]
        return [*own, *(line[2:] for line in spark), *lines, ""][0]

    def _run(self, plan: TaskPlan) -> None:
        try:
            self._context.setJobGroup(self._group, f"hvdtrain: {plan.size} ranks", True)
            tasks = self._context.parallelize(range(plan.size), plan.size).barrier()
            self.ends = tasks.mapPartitionsWithIndex(functools.partial(run_rank, plan)).collect()
        except Exception as error:  # noqa: BLE001 - py4j's and Spark's: the caller reports it
            self.error = error
        finally:
            os.write(self._write_end, b".")


class Ranks:
    """A function's run. Everything happens in the calling thread, so an interrupt can arrive at any moment."""

    def __init__(
        self,
        context: Any,
        np: int,
        *,
        show: Callable[[Sequence[Line]], None],  # takes what ranks print; with rank None what is said about the job
        deadline: float,  # until when all ranks must have been started, of time.monotonic()
        limit_s: float,  # the same in messages
    ) -> None:
        conf, local = context.getConf(), bool(context._jsc.sc().isLocal())
        name = network.LOOPBACK if local else conf.get("spark.driver.host")
        self.outcome = Outcome(np, status=1)
        self._np, self._show, self._deadline, self._limit_s = np, show, deadline, limit_s
        self._hosts: dict[int, str] = {}
        self._ends: dict[int, tuple[int, str]] = {}  # rank -> exit status, and the kind of its answer, "" for none
        self._own: Exception | None = None
        self._connections: dict[Connection, int | None] = {}
        self._end_others_at = self._give_up_at = float("inf")
        self._stopping = self._ending = self._cancelled = False
        self._listener = wire.TaskListener(name if local else conf.get("spark.driver.bindAddress", name), name)
        self._job = SparkJob(context)

    def run(self, task: Message, environment: Mapping[str, str]) -> None:
        """Start the ranks and return when all have ended; a KeyboardInterrupt is raised then."""
        self._job.start(TaskPlan(self._listener.address, task, environment, self._np))
        until_ended(self._follow, self._interrupt)
        # A rank that was killed comes first: its peers' errors follow from that, and may arrive before.
        failed = {rank: end for rank, end in self._ends.items() if end[0]} or self._ends
        if failed:
            rank, (code, _) = min(failed.items(), key=lambda item: not (item[1][0] > 128 and not item[1][1]))
            self.outcome.cause = Cause(f"rank {rank} on host {self._hosts[rank]}", code, rank)
        for end in self._job.ends:
            self.outcome.tails[end.rank] = end.tail
            if end.answer is not None:
                self.outcome.answers[end.rank] = end.answer

    def own_problem(self) -> Exception | None:
        """Return the error of the job itself; None if there is none."""
        if self._own is None and self._job.error is not None and not (self._cancelled and self._ends):
            kind = RankFailedError if len(self._hosts) == self._np else UsageError
            return kind(f"the Spark job of the ranks failed: {self._job.reason()}")
        return self._own

    def close(self) -> None:
        """Close the connections, and wait for the end of the job."""
        self._listener.close()
        for connection in self._connections:
            connection.close()  # the rank's task ends it
        self._job.close(_END_S)

    def _follow(self) -> None:
        """Show what ranks print, and end them where necessary, until the job has ended."""
        while True:
            now = time.monotonic()
            if len(self._hosts) < self._np and now > self._deadline:
                there = f"{len(self._hosts)} of {self._np} ranks had been started after {self._limit_s:g} s"
                self._refuse(
                    f"{there}. Spark starts all together, once it has enough free task slots: other jobs may hold "
                    "them. Wait for those jobs, use fewer ranks, or raise start_timeout_s"
                )
            if now > self._end_others_at:
                self._end()
            if now > self._give_up_at:
                self._cancelled = True
                if now > self._give_up_at + _END_S:
                    self._own = self._own or RankFailedError(
                        "the Spark job of the ranks was cancelled, but still runs. End it by stopping the SparkSession"
                    )
                    return
            if self._cancelled:
                self._job.cancel()
            soon = min(self._end_others_at, self._give_up_at)
            soon = min(soon, self._deadline if len(self._hosts) < self._np else now + _POLL_S)
            pause = min(_POLL_S, max(0.0, soon - now) + 0.01)  # another thread's signal is handled only after it
            ready = wait([self._job.end, *self._listener.sources(), *self._connections], timeout=pause)
            for each in ready:
                self._take(each)
            if self._job.end in ready:
                break
        # Read what tasks sent before the job ended, and wait for those that are still ending: nothing is left. The
        # listener's thread may not have handed over the connection of a task that has already ended.
        until = time.monotonic() + _END_S
        while self._connections or len(self._hosts) < len(self._job.ends):
            if (left := until - time.monotonic()) <= 0:
                break
            for each in wait([*self._listener.sources(), *self._connections], timeout=left):
                self._take(each)
        self._listener.close()

    def _take(self, source: object) -> None:
        if isinstance(source, Connection):
            if (message := wire.receive(source)) is None:
                self._lose(source)
            elif message["kind"] == "lines":
                self._show([(rank, text) for rank, text in message["lines"]])
            elif message["kind"] == "here":
                self._connections[source] = message["rank"]
                self._hosts[message["rank"]] = message["host"]
            elif message["kind"] == "refused":
                self._refuse(message["text"])
            elif (rank := self._connections[source]) is not None:
                self._note_end(rank, message)
        elif isinstance(source, socket.socket):
            connection = self._listener.take()
            self._connections[connection] = None
            if self._ending:  # it is late
                self._tell("end", connection)
            if len(self._connections) == self._np:
                self._listener.close()

    def _note_end(self, rank: int, message: Mapping[str, Any]) -> None:
        self.outcome.seconds = max(self.outcome.seconds, float(message["seconds"]))
        code = 0 if self._ending else message["code"]  # an exit that was requested here is no cause
        self._ends[rank] = code, message["answer"]
        if code not in (0, EXIT_STOPPED) and not self._stopping:
            self._end_others_at = min(self._end_others_at, time.monotonic() + LAST_WORDS_S)
        if len(self._ends) == self._np:
            self._end_others_at = float("inf")
            self._give_up_at = min(self._give_up_at, time.monotonic() + _RESULTS_S)

    def _lose(self, connection: Connection) -> None:
        """Remove a task that has closed its connection. If it reported no end of its rank, the task was lost."""
        rank = self._connections.pop(connection)
        connection.close()
        if rank is None or rank in self._ends or self._ending:
            return
        who = f"rank {rank} on host {self._hosts[rank]}"
        self._own = self._own or RankFailedError(
            f"{who} was lost with its Spark task: its executor was killed or cannot be reached. See the executor's log",
            rank=rank,
        )
        self._end()

    def _refuse(self, problem: str) -> None:
        if self._own is None:
            self._own = UsageError(problem)
            self._cancel()

    def _interrupt(self) -> None:
        """Ask the ranks to stop; the second time, or before they have started, end them at once."""
        if self._stopping or len(self._hosts) < self._np:
            self._cancel()
        else:
            self._give_up_at = time.monotonic() + GRACE_S + _END_S
            self._tell("stop", *self._connections)
        self._stopping = True

    def _cancel(self) -> None:
        self._deadline = float("inf")
        self._cancelled = True
        self._end()

    def _end(self) -> None:
        self._end_others_at = float("inf")
        if not self._ending:
            self._ending = True
            self._give_up_at = min(self._give_up_at, time.monotonic() + _END_S)
            self._tell("end", *self._connections)

    def _tell(self, kind: str, *connections: Connection) -> None:
        for connection in connections:
            with suppress(OSError):  # it has ended
                wire.send(connection, kind=kind)
