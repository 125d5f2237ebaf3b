"""A job with a fixed number of ranks: all are placed at once, and one that fails ends the job."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hvdtrain.errors import HvdTrainError
from hvdtrain.horovod_build.shared import proof
from hvdtrain.integrations import rendezvous
from hvdtrain.integrations.ray.cluster import POLL_S, RayCluster, Request, Worker, placement_group
from hvdtrain.launch.exchange import Message
from hvdtrain.launch.exit_cause import Cause
from hvdtrain.launch.function_job import Outcome
from hvdtrain.system import network
from hvdtrain.system.settings import EXIT_STOPPED

_LAST_WORDS_S = 1.0  # for peers of a rank that failed: they cannot continue
_CAUSE_S = 10.0  # for the answer of the rank that failed, if a peer answered first


class RayOutcome(Outcome):
    """How a job ended, noted rank by rank; Ray has shown what ranks printed."""

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
        """Whether a rank has ended in a way that the others cannot continue."""
        return (self.cause is not None and self.cause.killed) or any(map(_is_failure, self.answers.values()))

    @property
    def is_explained(self) -> bool:
        """Whether the cause of the failure is known."""
        return self.cause is not None or any(
            _is_failure(answer) and not answer.facts.get("others") for answer in self.answers.values()
        )


def _is_failure(answer: Message) -> bool:
    return answer.facts["kind"] == "error" or answer.facts.get("code") not in (None, 0, EXIT_STOPPED)


def run(cluster: RayCluster, request: Request) -> RayOutcome:
    """Run the job to its end."""
    outcome = RayOutcome(request.ranks)
    with placement_group(cluster, request) as group:
        workers = _start(cluster, request, group)
        with _rendezvous(cluster, workers) as environments:
            began = time.monotonic()
            task = cluster.ray.put(request.task.pickled)
            refs = {
                worker.handle.run.remote({**request.environment, **environment}, request.task.facts, task): rank
                for rank, (worker, environment) in enumerate(zip(workers, environments, strict=True))
            }
            failed_at = 0.0

            def ended() -> bool:
                """Wait a moment; return whether all have answered, or, after a failure, those that explain it."""
                nonlocal failed_at
                for ref in cluster.ray.wait(list(refs), timeout=POLL_S)[0]:
                    rank = refs.pop(ref)
                    outcome.take(rank, cluster.answer(ref, workers[rank], rank), workers[rank])
                if not refs or not outcome.has_failed:
                    return not refs
                failed_at = failed_at or time.monotonic()
                return time.monotonic() - failed_at > (_LAST_WORDS_S if outcome.is_explained else _CAUSE_S)

            cluster.follow(ended, lambda: workers)
            outcome.seconds = time.monotonic() - began
    return outcome


def _start(cluster: RayCluster, request: Request, group: Any) -> list[Worker]:
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
                f"{request.start_timeout_s:g} s. Look into {cluster.session.logs}, or raise start_timeout_s"
            )
        time.sleep(POLL_S / 4)
    return workers


@contextmanager
def _rendezvous(cluster: RayCluster, workers: Sequence[Worker]) -> Iterator[list[dict[str, str]]]:
    """Serve the rendezvous of the ranks; yield the environment of each.

    Ray sends the key to them with their task. Whoever can read the cluster's network can read the key, unless Ray uses
    TLS (RAY_USE_TLS). Whoever can start tasks on the cluster does not need it.
    """
    gpus: dict[str, list[Sequence[str]]] = {}
    for worker in workers:
        gpus.setdefault(worker.facts["node"], []).append(worker.facts["gpus"])
    local = [*gpus] == [cluster.node()] and os.environ.get("HVDTRAIN_LOOPBACK") != "0"
    address = network.LOOPBACK if local else cluster.address()
    slots = rendezvous.slots({node: len(ranks) for node, ranks in gpus.items()})
    key = proof.new_key()
    server = rendezvous.make_server(bytes.fromhex(key))
    with rendezvous.serving(server, address) as port:
        server.init(slots)
        yield [
            rendezvous.variables(slot, address, port, "lo" if local else worker.facts["interface"])
            | {proof.VARIABLE: key, **_gpus(gpus[worker.facts["node"]])}
            for worker, slot in zip(workers, slots, strict=True)
        ]


def _gpus(ranks: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return the setting that shows each rank the GPUs of its node's ranks, its own at the index of its local rank.

    Ray shows each rank only its own GPUs. NCCL is faster between GPUs that both sides see.
    """
    if not all(ranks):
        return {}
    first, rest = [gpus[0] for gpus in ranks], [gpu for gpus in ranks for gpu in gpus[1:]]
    return {"CUDA_VISIBLE_DEVICES": ",".join([*first, *rest])}
