"""The common part of ranks on Ray and on Spark: they find each other over Gloo; the environment of a new run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hvdtrain.distributed import tuning
from hvdtrain.horovod_build.shared import proof
from hvdtrain.launch import job_environment
from hvdtrain.system import start_ranks
from hvdtrain.system.process_tree import RUN_DIR

# What belongs to a job that this process is part of.
_NOT_PASSED = (
    RUN_DIR, "HVDTRAIN_CALL_", proof.VARIABLE, "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_GLOO_",
)  # fmt: skip


def environment(name: str, given: Mapping[str, str], *, passed: tuple[str, ...]) -> dict[str, str]:
    """Return the environment that is the same for all ranks of a run of `name`.

    It has this process's variables whose names begin with one of `passed`, and the user's, `given`, which win.
    """
    ours = tuning.without_ours(start_ranks.rank_environment({}, without=_NOT_PASSED))
    found = {variable: value for variable, value in ours.items() if variable.startswith(passed)}
    run = job_environment.as_new_run(found, name)
    return {**run, **{variable: str(value) for variable, value in given.items()}}


def slots(ranks: Mapping[str, int]) -> list[Any]:
    """Return Horovod's place for each rank, from {host: ranks on it}."""
    hosts = importlib.import_module("horovod.runner.common.util.hosts")
    named = [hosts.HostInfo(*each) for each in ranks.items()]
    return list(hosts.get_host_assignments(named, sum(ranks.values())))


def make_server(key: bytes) -> Any:
    """Return Horovod's rendezvous server; only clients with the job's key may use it."""
    return importlib.import_module("horovod.runner.http.http_server").RendezvousServer(0, key)


@contextmanager
def serving(server: Any, address: str, *handler: type) -> Iterator[int]:
    """Let a rendezvous server listen at `address` only; yield its port."""
    port: int = server.start(*handler, host=address)
    try:
        yield port
    finally:
        server.stop()


def variables(slot: Any, address: str, port: int, interface: str, *, elastic: bool = False) -> dict[str, str]:
    """Return the variables by which the rank of a slot finds the others, over a network interface."""
    gloo = importlib.import_module("horovod.runner.gloo_run")
    found = gloo.create_run_env_vars(address, [interface], port, elastic=elastic) | gloo.create_slot_env_vars(slot)
    return {name: str(value) for name, value in found.items() if value}


def visible_gpus(ranks: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return the setting that shows each rank of a host the GPUs of all, its own at the index of its local rank."""
    if not all(ranks):  # Ray and Spark show each rank only its own; NCCL is faster between GPUs that both sides see
        return {}
    first, rest = [gpus[0] for gpus in ranks], [gpu for gpus in ranks for gpu in gpus[1:]]
    return {"CUDA_VISIBLE_DEVICES": ",".join([*first, *rest])}
