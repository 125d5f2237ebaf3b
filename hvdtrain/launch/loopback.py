"""Keep a job of one host on the loopback interface and its files in its folder; over mpirun others on theirs."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.horovod_build import installed
from hvdtrain.horovod_build.shared import listen_on, loopback
from hvdtrain.launch.arguments import LaunchSpec, value
from hvdtrain.system import network

# Built with Horovod: mpirun listens on every interface, whatever its settings say. This library prevents it.
PRELOADED = Path("runner", "libhvdtrain_listen.so")
_DISCOVERY_LIMIT_S = 60.0


def discovered_hosts(script: str) -> list[str]:
    """Return the hosts that a host discovery script prints now; raise a UsageError if it does not print any."""
    try:
        done = subprocess.run(script, shell=True, capture_output=True, text=True, timeout=_DISCOVERY_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"--host-discovery-script {script} did not end within {_DISCOVERY_LIMIT_S:g} s. Run it by itself to see why"
        ) from None
    found = [line.strip().rpartition(":")[0] or line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0 or not found:
        said = (done.stderr.strip().splitlines() or ["it printed no line HOST:SLOTS"])[-1]
        raise UsageError(f"--host-discovery-script {script} failed with status {done.returncode}: {said}")
    return found


def elastic_flags(options: Sequence[str]) -> list[str]:
    """Return the options that an elastic horovodrun also needs if this is its only host.

    Without them horovodrun looks for an interface that two hosts share, and waits for a second host for ever.
    """
    script = value(options, "--host-discovery-script")
    if script is None or value(options, "--network-interfaces", "--network-interface") is not None:
        return []
    return ["--network-interfaces", network.interface()] if network.is_here(discovered_hosts(script)) else []


def settings(run_dir: Path, spec: LaunchSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a job of one host, without those that the user has set in `environment` or as options.

    hvdtrain's horovodrun uses only loopback by itself. Raises UsageError if mpirun cannot be restricted to loopback.
    """
    given = " ".join(spec.options)
    # A process that is killed leaves its files behind: they belong in a folder that is removed.
    wanted = {"OMPI_MCA_orte_tmpdir_base": str(run_dir), "OMPI_MCA_btl_vader_backing_directory": str(run_dir)}
    chosen = {}
    if environment.get("HVDTRAIN_LOOPBACK") == "0":
        pass
    elif spec.is_mpirun:
        # One host needs shared memory only. Open MPI's tcp and libfabric's ofi listen on the network, and so does cm.
        wanted |= {"OMPI_MCA_btl": "^openib,tcp,ofi,usnic,uct", "OMPI_MCA_pml": "ob1"}
        chosen = {"LD_PRELOAD": _preload(environment.get("LD_PRELOAD")), "HVDTRAIN_LISTEN_ON": ""}
    elif (
        not spec.over_gloo
        and spec.option("--network-interfaces", "--network-interface") is None
        and "mpi" in str(installed.record().get("data_planes", "")).split(",")
    ):  # horovodrun starts an mpirun, and keeps it on loopback
        _preload(None)  # fail now, not after three restarts
    is_chosen = {name for name in wanted if name in environment or f"mca {name.partition('_MCA_')[2]} " in given}
    return {**chosen, **{name: text for name, text in wanted.items() if name not in is_chosen}}


def listening(spec: LaunchSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which mpirun, its daemons and ranks on several hosts listen only at chosen interfaces.

    The options or `environment` may choose them.
    """
    options = " ".join(spec.options)
    interfaces = listen_on.interfaces((), options, environment)
    return listen_on.variables(_library(), interfaces, spec.hosts, options, environment)


def _library() -> str:
    return str((installed.package_folder("horovod") or Path("horovod")) / PRELOADED)


def _preload(before: str | None) -> str:
    try:
        return loopback.preload(_library(), before)
    except loopback.LoopbackError as problem:
        raise UsageError(str(problem)) from None
