"""A job whose number of ranks stays: all are placed at once, and the end of one is the end of all."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.errors import HvdTrainError
from hvdtrain.horovod_build.added.horovod.runner.common.util import proof
from hvdtrain.integrations.ray.cluster import POLL_S, Cluster, Death, Request, Worker, placement_group
from hvdtrain.runner.causes import STOPPED, Cause
from hvdtrain.runner.exchange import Message

Follow = Callable[[Callable[[], bool], Callable[[], Sequence[Worker]]], None]

_LAST_WORDS_S = 1.0  # for peers of a rank that failed: they cannot go on
_CAUSE_S = 10.0  # for the one that failed, where a peer has noticed first


@dataclass
class Outcome:
    """What came of a job; see `hvdtrain.runner.outcome.Ended`."""

    size: int
    answers: dict[int, Message] = field(default_factory=dict)
    cause: Cause | None = None
    seconds: float = 0.0

    def take(self, rank: int, answer: Message | Death, worker: Worker) -> None:
        """Note how a rank ended."""
        is_explained = self.is_explained
        if isinstance(answer, Message):
            self.answers[rank] = answer
            if answer.facts["kind"] == "exit" and not is_explained:
                self.cause = Cause(worker.who(rank), answer.facts["code"], rank)
        elif not is_explained:
            self.cause = answer

    def tail(self, rank: int | None) -> list[str]:
        """Return nothing: Ray has shown what ranks printed."""
        return []

    def status(self) -> int:
        """Return 0: no process stands between."""
        return 0

    @property
    def has_failed(self) -> bool:
        """Whether a rank has ended so that the others cannot go on."""
        return isinstance(self.cause, Death) or any(map(_is_failure, self.answers.values()))

    @property
    def is_explained(self) -> bool:
        """Whether it is known why."""
        return self.cause is not None or any(
            _is_failure(answer) and not answer.facts.get("others") for answer in self.answers.values()
        )


def _is_failure(answer: Message) -> bool:
    return answer.facts["kind"] == "error" or answer.facts.get("code") not in (None, 0, STOPPED)


def run(cluster: Cluster, request: Request, follow: Follow) -> Outcome:
    """Run the job to its end.

    Args:
        cluster: where.
        request: what.
        follow: asks its first argument whether the job has ended until it has, and handles interrupts of the workers
            that the second one returns.
    """
    outcome = Outcome(request.ranks)
    with placement_group(cluster, request) as group:
        workers = _start(cluster, request, group)
        with _rendezvous(cluster, workers) as environments:
            began = time.monotonic()
            task = cluster.ray.put(request.task.pickled)
            refs = {
                worker.handle.run.remote({**request.environment, **environment}, request.task.facts, task): rank
                for rank, (worker, environment) in enumerate(zip(workers, environments, strict=True))
            }
            follow(_Follower(cluster, workers, refs, outcome).ended, lambda: workers)
            outcome.seconds = time.monotonic() - began
    return outcome


def _start(cluster: Cluster, request: Request, group: Any) -> list[Worker]:
    """Return a worker a rank, in rank order: those of a node follow each other, this process's node first."""
    strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    nodes: dict[int, str] = cluster.ray.util.placement_group_table(group)["bundles_to_node_id"]
    here = cluster.node()
    order = sorted(nodes, key=lambda bundle: (nodes[bundle] != here, nodes[bundle], bundle))
    workers = [
        cluster.start(f"rank {rank}", request, scheduling_strategy=strategy(group, bundle))
        for rank, bundle in enumerate(order)
    ]
    until = time.monotonic() + request.start_timeout_s
    while not all(map(cluster.has_started, workers)):
        if time.monotonic() > until:
            raise HvdTrainError(
                f"the ranks had room on the Ray cluster, but their processes have not started within "
                f"{request.start_timeout_s:g} s (start_timeout_s). {cluster.logs()} may say why"
            )
        time.sleep(POLL_S / 4)
    return workers


@contextmanager
def _rendezvous(cluster: Cluster, workers: Sequence[Worker]) -> Iterator[list[dict[str, str]]]:
    """Let ranks find each other; give each one's environment."""
    hosts = importlib.import_module("horovod.runner.common.util.hosts")
    gloo = importlib.import_module("horovod.runner.gloo_run")
    nodes = list(dict.fromkeys(worker.facts["node"] for worker in workers))
    local = nodes == [cluster.node()] and os.environ.get("HVDTRAIN_LOOPBACK") != "0"
    address = "127.0.0.1" if local else cluster.address()
    on = {node: [worker for worker in workers if worker.facts["node"] == node] for node in nodes}
    plan = hosts.get_host_assignments([hosts.HostInfo(node, len(on[node])) for node in nodes], len(workers))
    server, key = rendezvous_server()
    with serving(server, address) as port:
        server.init(plan)
        environments = []
        for worker, slot in zip(workers, plan, strict=True):
            name = "lo" if local else worker.facts["interface"]
            environments.append(
                {**settings(gloo, address, port, name), **key, **gloo.create_slot_env_vars(slot)}
                | _gpus([peer.facts["gpus"] for peer in on[worker.facts["node"]]])
            )
        yield environments


def rendezvous_server() -> tuple[Any, dict[str, str]]:
    """Return a rendezvous server with a key of its own, and the variable by which ranks get it.

    Ray takes it to them with their task. Who can make Ray run something has no need of it; who can read the network can
    read it, unless the cluster's traffic is by TLS (RAY_USE_TLS).
    """
    key = proof.new_key()
    server = importlib.import_module("horovod.runner.http.http_server").RendezvousServer(0, bytes.fromhex(key))
    return server, {proof.VARIABLE: key}


@contextmanager
def serving(server: Any, address: str, *handler: type) -> Iterator[int]:
    """Let Horovod's rendezvous server listen at `address` alone; give its port."""
    port: int = server.start(*handler, host=address)
    try:
        yield port
    finally:
        server.stop()


def settings(gloo: Any, address: str, port: int, interface: str, *, elastic: bool = False) -> dict[str, str]:
    """Return what a rank needs to find the others, by way of `interface`."""
    found = gloo.create_run_env_vars(address, [interface], port, elastic=elastic)
    return {name: str(value) for name, value in found.items() if value}


def _gpus(ranks: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return the setting by which all ranks of a node see all their GPUs, the local rank's own in its place.

    Ray shows each its own alone; NCCL is faster between GPUs that both sides see.
    """
    if not all(ranks):
        return {}
    first, rest = [gpus[0] for gpus in ranks], [gpu for gpus in ranks for gpu in gpus[1:]]
    return {"CUDA_VISIBLE_DEVICES": ",".join([*first, *rest])}


class _Follower:
    """Takes what ranks answer, as it comes.

    Args:
        cluster: where they are.
        workers: in rank order.
        refs: what to wait for -> rank.
        outcome: takes it.
    """

    def __init__(self, cluster: Cluster, workers: Sequence[Worker], refs: Mapping[Any, int], outcome: Outcome) -> None:
        self._cluster, self._workers, self._outcome = cluster, workers, outcome
        self._waiting = dict(refs)
        self._failed_at = 0.0

    def ended(self) -> bool:
        """Look for a moment; return whether all answers are there, or those that matter."""
        outcome = self._outcome
        for ref in self._cluster.ray.wait(list(self._waiting), timeout=POLL_S)[0]:
            rank = self._waiting.pop(ref)
            answer = self._cluster.answer(ref, self._workers[rank], rank)
            outcome.take(rank, answer, self._workers[rank])
        if outcome.has_failed:
            self._failed_at = self._failed_at or time.monotonic()
            patience = _LAST_WORDS_S if outcome.is_explained else _CAUSE_S
            return not self._waiting or time.monotonic() - self._failed_at > patience
        return not self._waiting
