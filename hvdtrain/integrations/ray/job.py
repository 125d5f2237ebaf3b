"""`hvdtrain.integrations.ray.run`: a function on ranks of a Ray cluster."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from hvdtrain.errors import HvdTrainError
from hvdtrain.horovod_build.shared import proof
from hvdtrain.integrations import rendezvous
from hvdtrain.integrations.ray import elastic
from hvdtrain.integrations.ray.cluster import POLL_S, RayCluster, RayOutcome, Request, Worker, placement_group
from hvdtrain.launch import job_environment
from hvdtrain.launch.exit_cause import LAST_WORDS_S
from hvdtrain.launch.function import check_call, make_task, name_of
from hvdtrain.system import network

T = TypeVar("T")

_CAUSE_S = 10.0  # for the answer of the rank that failed, if a peer answered first
# Variables of this process that ranks need on any node. Ray itself passes on those of its runtime_env.
_PASSED = ("HVDTRAIN_", "HOROVOD_", "KERAS_", "NCCL_", "TF_")


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int,
    cpus_per_rank: float = 1,
    gpus_per_rank: int = 0,
    min_np: int | None = None,
    max_np: int | None = None,
    reset_limit: int | None = 10,
    start_timeout_s: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> list[T]:
    """Call `fn(*args, **kwargs)` on `np` ranks of a Ray cluster and return what it returned on each, in rank order.

    This is `hvdtrain.run` on a cluster. Ray prints here what ranks print. An interrupt (Ctrl-C) asks the ranks to stop
    and gives them 30 s to write a checkpoint; a second one ends them at once. Nothing is left on the cluster. If this
    process is not connected to a cluster, it connects to the one that RAY_ADDRESS names, else to one that this user or
    the system runs on this host, else to a new one for this call.

    With min_np or max_np the job is elastic, for a Trainer or an elastic state in `fn`: when a rank's process dies, the
    others continue from their last commit, and a new process joins them once Ray has room for it. An exception that
    `fn` raises still ends the job.

    Args:
        fn: what to call. hvdtrain and its Horovod must be installed on every node.
        args: its positional arguments.
        kwargs: its keyword arguments.
        np: number of ranks; of an elastic job, to begin with.
        cpus_per_rank: CPUs that Ray reserves for each rank; rounded down, also its number of threads.
        gpus_per_rank: GPUs that Ray reserves for each rank.
        min_np: elastic: with fewer ranks the job waits for new ones; by default 1.
        max_np: elastic: the largest number of ranks, used if there is room; by default np.
        reset_limit: elastic: how often the job may reset, once for each death and each new rank; None for no limit.
        start_timeout_s: how long to wait for room on the cluster, which may have to grow.
        environment: variables for ranks, besides this process's HVDTRAIN_*, HOROVOD_*, KERAS_*, NCCL_* and TF_*.

    Raises:
        TypeError: `fn` cannot be called, or an argument or a returned value cannot be pickled.
        ValueError: a number is out of range.
        PackageMissingError: Ray is not installed.
        UsageError: no ranks can be started from here, or there was no room for them in time.
        RankFailedError: a rank's process died or ended without a result. It is also the cause (`__cause__`) of an
            exception that `fn` raised on a rank, which is raised here as it is, and has the rank and its traceback.
    """
    check_call(fn, args, np)
    limits = _check(np, cpus_per_rank, gpus_per_rank, min_np, max_np, reset_limit, start_timeout_s)
    job_environment.check_place("hvdtrain.integrations.ray.run")
    task = make_task(fn, args, kwargs)
    with RayCluster() as cluster:
        chosen = _environment(name_of(fn), cpus_per_rank, environment or {})
        request = Request(task, np, cpus_per_rank, gpus_per_rank, start_timeout_s, chosen)
        cluster.check_room(request)
        outcome = run_fixed(cluster, request) if limits is None else elastic.run(cluster, request, limits)
    return outcome.values()


def _check(
    np: int, cpus: float, gpus: int, min_np: int | None, max_np: int | None, reset_limit: int | None, timeout_s: float
) -> elastic.Limits | None:
    """Check the numbers; return the limits of an elastic job, None for a job that is not elastic."""
    if isinstance(cpus, bool) or not isinstance(cpus, (int, float)) or not 0 <= cpus < float("inf"):
        raise ValueError(f"cpus_per_rank must be a number, 0 or more. Received: cpus_per_rank={cpus!r}")
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 0:  # NCCL wants no two ranks on one GPU
        raise ValueError(f"gpus_per_rank must be a whole number, 0 or more. Received: gpus_per_rank={gpus!r}")
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"start_timeout_s must be a number of seconds above 0. Received: {timeout_s!r}")
    if min_np is None and max_np is None:
        return None
    least, most = 1 if min_np is None else min_np, np if max_np is None else max_np
    if not 1 <= least <= np <= most:
        raise ValueError(f"1 <= min_np <= np <= max_np must hold. Received: min_np={least}, np={np}, max_np={most}")
    if reset_limit is not None and reset_limit < 0:
        raise ValueError(f"reset_limit must be 0 or more, or None. Received: reset_limit={reset_limit}")
    return {"min_num_proc": least, "max_num_proc": most, "reset_limit": reset_limit}


def _environment(name: str, cpus: float, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that is the same for all ranks."""
    threads = str(max(1, int(cpus)))  # not this process's: in a job's script they are Ray's, not the user's
    found = rendezvous.environment(name, given, passed=_PASSED)
    return {"OMP_NUM_THREADS": threads, "TF_NUM_INTRAOP_THREADS": threads, **found}


def run_fixed(cluster: RayCluster, request: Request) -> RayOutcome:
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
                return time.monotonic() - failed_at > (LAST_WORDS_S if outcome.is_explained else _CAUSE_S)

            cluster.follow(ended, lambda: workers)
            outcome.seconds = time.monotonic() - began
    return outcome


def _start(cluster: RayCluster, request: Request, group: Any) -> list[Worker]:
    """Return a worker a rank, in rank order: a node's workers follow each other, this process's node first."""
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
    """Serve the rendezvous of the ranks; yield the environment of each."""
    # The key travels with their task: who can read the network can read it, unless Ray uses TLS (RAY_USE_TLS).
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
            | {proof.VARIABLE: key, **rendezvous.visible_gpus(gpus[worker.facts["node"]])}
            for worker, slot in zip(workers, slots, strict=True)
        ]
