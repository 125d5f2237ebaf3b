"""Where a job may be started, and the environment of its launcher and ranks."""

from __future__ import annotations

import datetime
import importlib.util
import secrets
import uuid
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.distributed import launch_environment
from hvdtrain.errors import UsageError
from hvdtrain.horovod_build.shared import start_checks
from hvdtrain.launch import arguments, loopback, other_hosts
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.system import open_mpi, start_ranks
from hvdtrain.system.settings import RUN_ID, RUN_NAME


def as_new_run(environment: Mapping[str, str], name: str) -> dict[str, str]:
    """Return the environment of ranks of a run of `name` that begins now: with its id and, unless chosen, its own name.

    Restarts of a job have both too, so they are one run: they share a run folder, and an id in loggers.
    """
    named = {RUN_NAME: f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"}
    return {**named, **environment, RUN_ID: uuid.uuid4().hex}


def check_place(who: str = "it") -> None:
    """Raise a UsageError if `who` cannot start ranks: in a rank, or without Horovod."""
    found = launch_environment.detect()
    if found and found.size and found.size > 1 and found.name != "Slurm":
        raise UsageError(f"{who} starts the ranks itself, and {found} has started this one. Run it by itself")
    if importlib.util.find_spec("horovod") is None:
        raise UsageError("Horovod is not installed, so no ranks can be started. Run `hvdtrain build`")


def check_host(spec: LaunchSpec) -> None:
    """Raise a UsageError where too few open files are allowed, or /dev/shm has no room for horovodrun's semaphores."""
    try:
        start_checks.check_open_files(spec.ranks if spec.is_here else 2)
        if not spec.is_mpirun:
            start_checks.check_semaphores()
    except start_checks.CannotStartError as problem:
        raise UsageError(str(problem)) from None


def environment(run_dir: Path, spec: LaunchSpec, *, name: str) -> dict[str, str]:
    """Return the environment of a launcher and its ranks; `name` is the script's, for the run's folder."""
    found = as_new_run(start_ranks.rank_environment({}), name)
    # When a rank has failed, the others cannot continue: kill them at once.
    found.setdefault("OMPI_MCA_odls_base_sigkill_timeout", "0")
    if spec.is_mpirun:  # as horovodrun does it: containers run as root, and `init` shares cores out
        found |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if not spec.hosts:
            found = {**open_mpi.OVERSUBSCRIBE_IN_5, **found}
        if not arguments.places_ranks(spec.options):
            found.setdefault("OMPI_MCA_hwloc_base_binding_policy", "none")
    if not spec.is_here:
        found = {**other_hosts.settings(), **found}
        if spec.is_mpirun:
            found |= loopback.listening(spec, found)
    elif not spec.elastic:
        found |= loopback.settings(run_dir, spec, found)
    return open_mpi.for_both(found)
