"""One rank, in a task of a Spark job: finds the others, runs the function in its own process, reports to the caller."""

from __future__ import annotations

import importlib
import json
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.horovod_build.shared import proof
from hvdtrain.integrations import rendezvous
from hvdtrain.integrations.spark import wire
from hvdtrain.launch import function, job_environment, job_folder
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.launch.exchange import Message
from hvdtrain.launch.function_job import FunctionJob
from hvdtrain.launch.rank_output import Line
from hvdtrain.system import network, start_ranks

_SPARKS = ("PYTHON_WORKER_FACTORY_",)  # address and secret of a worker's executor: not for ranks


@dataclass(frozen=True)
class TaskPlan:
    """The input of every task. The job's key in it is as safe as Spark's own traffic is (spark.authenticate)."""

    address: wire.Address  # the caller's
    task: Message  # the function, for `hvdtrain.launch.rank`
    environment: Mapping[str, str]  # for ranks, on top of the executor's own
    size: int


@dataclass(frozen=True)
class RankEnd:
    """The end of one rank, and the last lines that it printed."""

    rank: int
    answer: Message | None  # None: it was killed
    tail: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """The place of a task, which each task sends to the others."""

    host: str
    address: str
    gpus: list[str]


def run_rank(plan: TaskPlan, partition: int, _: object) -> Iterator[RankEnd]:
    """Run a rank to its end, and yield how it ended. Yield nothing if it cannot run; then the caller has the reason."""
    try:
        connection = wire.connect(plan.address)
    except (OSError, AuthenticationError) as problem:
        where = f"{plan.address.host}:{plan.address.port}"
        raise RuntimeError(
            f"the driver cannot be reached at {where} from {socket.gethostname()}: {problem}. Set spark.driver.host to "
            "an address that the executors reach, and open its ports for them"
        ) from None
    try:
        end = _run_rank(plan, partition, connection)
    except UsageError as problem:
        wire.send(connection, kind="refused", text=f"on host {socket.gethostname()}: {problem}")
    else:
        yield end
    finally:
        connection.close()


def _run_rank(plan: TaskPlan, partition: int, connection: Connection) -> RankEnd:
    job_environment.check_place("hvdtrain.integrations.spark.run")
    context = importlib.import_module("pyspark").BarrierTaskContext.get()
    gpus = [list(found.addresses) for name, found in context.resources().items() if name == "gpu"]
    mine = Place(socket.gethostname(), wire.own_address(connection), gpus[0] if gpus else [])
    places = [Place(**json.loads(text)) for text in context.allGather(json.dumps(vars(mine)))]
    order = rank_order([place.host for place in places])
    rank = order.index(partition)
    wire.send(connection, kind="here", rank=rank, host=mine.host)
    key = bytes.fromhex(plan.environment[proof.VARIABLE])
    with _rendezvous(rank, [places[each] for each in order], context, key) as found:
        return _call(plan, rank, found, connection)


def rank_order(hosts: Sequence[str]) -> list[int]:
    """Return the partitions in the order of ranks: host by host, as Horovod numbers them."""
    return sorted(range(len(hosts)), key=lambda partition: (hosts.index(hosts[partition]), partition))


@contextmanager
def _rendezvous(rank: int, places: Sequence[Place], context: Any, key: bytes) -> Iterator[dict[str, str]]:
    """Let ranks find each other, at a server in rank 0's task that has the job's key; yield Horovod's variables."""
    counts = Counter(place.host for place in places)
    slots = rendezvous.slots(counts)
    address, own = (network.LOOPBACK if len(counts) == 1 else place.address for place in (places[0], places[rank]))
    interface = network.interface(own)
    if not interface:
        raise UsageError(f"no network interface has the address {own}, by which this executor reaches the driver")
    with ExitStack() as stack:
        port = 0
        if rank == 0:
            server = rendezvous.make_server(key)
            port = stack.enter_context(rendezvous.serving(server, address))
            server.init(slots)
        port = max(int(each) for each in context.allGather(str(port)))
        yield {**rendezvous.variables(slots[rank], address, port, interface), **visible_gpus(rank, places)}


def visible_gpus(rank: int, places: Sequence[Place]) -> dict[str, str]:
    """Return the variable that shows a rank the GPUs of all ranks of its host, by local rank; {} without GPUs."""
    return rendezvous.visible_gpus([place.gpus[:1] for place in places if place.host == places[rank].host])


class _CallerGoneError(Exception):
    """The caller requests an immediate end, or has ended."""


def _call(plan: TaskPlan, rank: int, found: Mapping[str, str], connection: Connection) -> RankEnd:
    environment = {**start_ranks.rank_environment(plan.environment, without=_SPARKS), **found, "PYTHONUNBUFFERED": "1"}
    # The executor's own paths come first: its packages may be in other folders than the caller's.
    path = [*sys.path, *(each for each in plan.task.facts["path"] if each not in sys.path)]
    task = Message({**plan.task.facts, "path": path}, plan.task.pickled)

    def show(lines: Sequence[Line]) -> None:
        # Every task has the lines about the job: rank 0's task sends them.
        mine = [line for line in lines if line[0] is not None or rank == 0]
        if mine:
            wire.send(connection, kind="lines", lines=mine)

    def read_request() -> None:
        message = wire.receive(connection)
        if message is None or message["kind"] != "stop":
            raise _CallerGoneError
        job.interrupt()

    run_dir, _ = job_folder.make(0)
    try:
        job = FunctionJob(
            LaunchSpec("python"), function.WORKER,
            environment=environment, run_dir=run_dir, task=task, show=show, rank=rank,
        )  # fmt: skip
        with closing(job), suppress(_CallerGoneError, OSError):  # closing it ends the rank
            job.follow({connection: read_request})
    finally:
        job_folder.remove(run_dir)
    outcome, answer = job.outcome, job.outcome.answers.get(rank)
    code = outcome.cause.code if outcome.cause else 128 + signal.SIGKILL
    with suppress(OSError):
        kind = answer.facts["kind"] if answer else ""
        wire.send(connection, kind="ended", code=code, seconds=outcome.seconds, answer=kind)
    return RankEnd(rank, answer, list(outcome.tails.get(None, ())))
