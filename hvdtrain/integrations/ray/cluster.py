"""A Ray cluster for ranks: connect, start each in an actor, notice how they end, and leave nothing behind."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.errors import HvdTrainError, PackageMissingError, UsageError
from hvdtrain.integrations.ray.session import Session
from hvdtrain.launch.exchange import Message
from hvdtrain.launch.exit_cause import Cause
from hvdtrain.launch.function_job import GRACE_S, Outcome, until_ended
from hvdtrain.system import network, process_tree
from hvdtrain.system.settings import EXIT_STOPPED

log = logging.getLogger("hvdtrain")

POLL_S = 0.2
_LEAVING_S = 10.0  # for a rank's exit handlers, such as a logger that writes its last lines


class Rank:
    """A process that becomes a rank by `run`, which uses the main thread, so that signals reach a Trainer."""

    def __init__(self, name: str) -> None:
        self._name = name  # the prefix of the lines that it prints

    def __repr__(self) -> str:
        return self._name

    def facts(self) -> dict[str, Any]:
        """Return where this process is: pid, host, node, the interface that has the node's address, and its GPUs."""
        ray = importlib.import_module("ray")
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "node": ray.get_runtime_context().get_node_id(),
            "interface": network.interface(ray.util.get_node_ip_address()),
            "gpus": [str(gpu) for gpu in ray.get_gpu_ids()],
        }

    def run(self, environment: Mapping[str, str], facts: Mapping[str, Any], pickled: bytes) -> tuple[Any, bytes]:
        """Call the function of a task, given as facts and pickled; return the answer as (facts, pickled)."""
        os.environ.update(environment)
        # What the caller can import can be imported here; this node's own packages come first.
        sys.path += [path for path in facts["path"] if path not in sys.path]
        from hvdtrain.launch import rank  # with a Horovod of this node

        answer, _ = rank.perform(rank.load(Message(dict(facts), pickled)))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return answer.facts, answer.pickled


def signal_processes(pids: Sequence[int], number: int) -> None:
    """Send a signal to processes of this node."""
    for pid in pids:
        process_tree.send(pid, number)


@dataclass(frozen=True)
class Request:
    """A job's request to the cluster, `cpus` and `gpus` for each rank."""

    task: Message
    ranks: int  # to begin with
    cpus: float
    gpus: int
    start_timeout_s: float  # to wait for room, and for processes to start
    environment: Mapping[str, str]

    @property
    def resources(self) -> dict[str, float]:
        """The resources of one rank, in Ray's names."""
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}


@dataclass(eq=False)
class Worker:
    """An actor that is a rank, or will be one."""

    handle: Any
    facts_ref: Any  # Ray's reference to its facts
    facts: dict[str, Any] = field(default_factory=dict)  # where it is; {} until it has started

    def who(self, rank: int) -> str:
        """Return the worker's name for messages."""
        return f"rank {rank} on host {self.facts['host']} (pid {self.facts['pid']})"


class RayOutcome(Outcome):
    """The end of a job, noted rank by rank; Ray has shown what ranks printed."""

    def take(self, rank: int, answer: Message | Cause, worker: Worker) -> None:
        """Note how a rank ended."""
        is_explained = self.is_explained
        if isinstance(answer, Message):
            self.answers[rank] = answer
            if answer.facts["kind"] == "exit" and not is_explained:
                self.cause = Cause(worker.who(rank), answer.facts["code"], rank)
        elif not is_explained:
            self.cause = answer

    @property
    def has_failed(self) -> bool:
        """True if a rank has ended in a way that the others cannot continue."""
        return (self.cause is not None and self.cause.killed) or any(map(_is_failure, self.answers.values()))

    @property
    def is_explained(self) -> bool:
        """True if the cause of the failure is known."""
        return self.cause is not None or any(
            _is_failure(a) and not a.facts.get("others") for a in self.answers.values()
        )


def _is_failure(answer: Message) -> bool:
    return answer.facts["kind"] == "error" or answer.facts.get("code") not in (None, 0, EXIT_STOPPED)


class RayCluster:
    """The job's use of Ray. On exit, all actors that the job started have ended."""

    def __init__(self) -> None:
        try:
            self.ray = importlib.import_module("ray")
        except ImportError as problem:
            raise PackageMissingError(
                f"hvdtrain.integrations.ray needs the package ray ({problem}). Type: pip install ray"
            ) from None
        self._workers: list[Worker] = []
        self._leaving: dict[Worker, Any] = {}
        self.session = Session(self.ray)

    def __enter__(self) -> RayCluster:
        """Connect, if not connected yet; a UsageError where that is by Ray Client."""
        try:
            self.session.connect()
            if importlib.import_module("ray.util.client").ray.is_connected():
                raise UsageError(
                    "hvdtrain.integrations.ray.run must run on the cluster. Ranks cannot reach a process that is "
                    "connected by Ray Client (ray://). Submit the script: ray job submit -- python train.py"
                )
        except BaseException:
            self.session.disconnect()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End all actors; those that are ending by themselves get some seconds."""
        try:
            self.kill([worker for worker in self._workers if worker not in self._leaving])
            if self._leaving:
                self.ray.wait(list(self._leaving.values()), num_returns=len(self._leaving), timeout=_LEAVING_S)
        finally:
            self.kill(self._workers)
            self.session.disconnect(keep_logs=kind is HvdTrainError)  # which names them

    def start(self, name: str, request: Request, **options: Any) -> Worker:
        """Request an actor; Ray starts it when it has room."""
        options |= {"num_cpus": request.cpus, "num_gpus": request.gpus, "max_restarts": 0}
        handle = self.ray.remote(Rank).options(**options).remote(name)
        self._workers.append(Worker(handle, handle.facts.remote()))
        return self._workers[-1]

    def has_started(self, worker: Worker) -> bool:
        """Return whether its process has started, and store its facts; an HvdTrainError if it could not be started."""
        if not worker.facts and self.ray.wait([worker.facts_ref], timeout=0)[0]:
            try:
                worker.facts = self.ray.get(worker.facts_ref)
            except self.ray.exceptions.RayError as problem:
                raise HvdTrainError(
                    f"a rank could not be started on the Ray cluster: {_why(problem)}. Every node needs the same "
                    "Python, hvdtrain, and a Horovod built by `hvdtrain build`"
                ) from None
        return bool(worker.facts)

    def answer(self, ref: Any, worker: Worker, rank: int) -> Message | Cause:
        """Return what a worker's `run` has answered, or its death; its process ends now, as a script's does."""
        try:
            answer = Message(*self.ray.get(ref))
        except self.ray.exceptions.RayError as problem:  # which tells no signal's number
            return Cause(worker.who(rank), 128 + signal.SIGKILL, rank, f"died ({_how(str(problem))})")
        self._leaving[worker] = worker.handle.__ray_terminate__.remote()
        return answer

    def follow(self, ended: Callable[[], bool], workers: Callable[[], Sequence[Worker]]) -> None:
        """Follow a job until it has `ended`; on an interrupt let its present `workers` stop in order."""
        until = math.inf

        def follow() -> None:
            while not ended() and time.monotonic() < until:
                pass

        def interrupt() -> None:
            nonlocal until
            if until < math.inf:
                log.warning("interrupted again: ending everything at once")
                until = 0.0
                return
            log.warning("interrupted: asking the ranks to stop; they get %g s", GRACE_S)
            until = time.monotonic() + GRACE_S
            self._ask_to_stop(workers())

        until_ended(follow, interrupt)

    def _ask_to_stop(self, workers: Sequence[Worker]) -> None:
        """Send SIGTERM to the processes of `workers`: a Trainer writes a checkpoint."""
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        nodes: dict[str, list[int]] = {}
        for worker in workers:
            if worker.facts:
                nodes.setdefault(worker.facts["node"], []).append(worker.facts["pid"])
        signal_processes(nodes.pop(self.node(), []), signal.SIGTERM)
        send = self.ray.remote(signal_processes)
        for node, pids in nodes.items():
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": affinity(node, soft=False)}
            send.options(**options).remote(pids, int(signal.SIGTERM))

    def kill(self, workers: Sequence[Worker]) -> None:
        """End actors at once."""
        for worker in workers:
            self.ray.kill(worker.handle, no_restart=True)

    def node(self) -> str:
        """Return the node of this process."""
        return str(self.ray.get_runtime_context().get_node_id())

    def address(self) -> str:
        """Return the address of this process's node."""
        return str(self.ray.util.get_node_ip_address())

    def check_room(self, request: Request) -> None:
        """Warn if the cluster is too small at present; it may grow."""
        has = self.ray.cluster_resources()
        if any(has.get(name, 0) < amount * request.ranks for name, amount in request.resources.items()):
            text = "there is no room for %s on this Ray cluster, which has %s: waiting up to %g s for it to grow"
            log.warning(text, _wanted(request), _amounts(request, has), request.start_timeout_s)

    def no_room(self, request: Request) -> UsageError:
        """Return the error for ranks that got no room in time."""
        has, free = self.ray.cluster_resources(), self.ray.available_resources()
        return UsageError(
            f"there was no room for {_wanted(request)} on this Ray cluster within {request.start_timeout_s:g} s: it "
            f"has {_amounts(request, has)}, of which {_amounts(request, free)} are free. Use fewer ranks (np), request "
            "less per rank (cpus_per_rank, gpus_per_rank), add nodes, or wait longer (start_timeout_s)"
        )


@contextlib.contextmanager
def placement_group(cluster: RayCluster, request: Request) -> Iterator[Any]:
    """Reserve room for all ranks at once, on as few nodes as possible; a UsageError if there is none in time."""
    until = time.monotonic() + request.start_timeout_s
    # Ray refuses an empty bundle; a rank that requests nothing gets almost nothing.
    bundles = [request.resources or {"CPU": 0.001} for _ in range(request.ranks)]
    group = cluster.ray.util.placement_group(bundles, strategy="PACK")
    try:
        while not group.wait(1):  # short waits, so that an interrupt is handled soon
            if time.monotonic() > until:
                raise cluster.no_room(request)
        yield group
    finally:
        cluster.ray.util.remove_placement_group(group)


def _wanted(request: Request) -> str:
    each = _amounts(request, request.resources)
    return f"{request.ranks} ranks with {each} each" if request.ranks > 1 else f"1 rank with {each}"


def _amounts(request: Request, resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0):g} {name}" for name in request.resources or ("CPU",))


def _how(text: str) -> str:
    """Return what Ray says of a process's end, without its guesses at the cause."""
    found = re.search(r"Worker exit detail: (.*?)\.? (?:Some common causes|$)", text, re.DOTALL)
    return " ".join(found.group(1).split()) if found else text.strip().splitlines()[-1].strip()


def _why(problem: BaseException) -> str:
    """Return the line, out of several tracebacks, that names the error on the node."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [repr(problem)]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (named or lines)[-1]
