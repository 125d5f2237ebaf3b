"""Keep a job of one host on the loopback interface and its files in its folder; over mpirun others on theirs."""

from __future__ import annotations

import importlib
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch.arguments import MPIRUN, value

# Built with Horovod: mpirun listens on every interface, whatever its settings say. This library prevents it.
PRELOADED = Path("runner", "libhvdtrain_listen.so")
_DISCOVERY_LIMIT_S = 60.0

ADDRESS = "127.0.0.1"


def is_here(hosts: Iterable[str]) -> bool:
    """Return whether all `hosts` are this one."""
    own = _own_addresses()
    for host in hosts:
        try:
            if socket.gethostbyname(host) not in own:
                return False
        except OSError:
            return False
    return True


def _own_addresses() -> set[str]:
    psutil = importlib.import_module("psutil")
    return {
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    }


def interface(address: str = ADDRESS) -> str:
    """Return the name of the network interface that has an IP address, by default loopback; "" if none has."""
    psutil = importlib.import_module("psutil")
    for name, found in psutil.net_if_addrs().items():
        if any(each.address == address for each in found):
            return str(name)
    return "lo" if address == ADDRESS else ""


def discovered_hosts(script: str) -> list[str]:
    """Return the hosts that a host discovery script names now.

    Raises:
        UsageError: the script fails, takes too long, or prints no host.
    """
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


def elastic_flags(passed: Sequence[str]) -> list[str]:
    """Return the options that an elastic horovodrun also needs if this is its only host.

    Without them horovodrun looks for an interface that two hosts share, and waits for a second host for ever.
    """
    script = value(passed, "--host-discovery-script")
    if script is None or value(passed, "--network-interfaces", "--network-interface") is not None:
        return []
    return ["--network-interfaces", interface()] if is_here(discovered_hosts(script)) else []


def settings(run_dir: Path, launcher: str, passed: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a job of one host, without those that the user has set in `environment` or `passed`.

    Args:
        run_dir: the job's private folder.
        launcher: "mpirun", or "horovodrun", which keeps to loopback by itself as hvdtrain builds it.
        passed: the launcher's options.
        environment: the launcher's variables.

    Raises:
        UsageError: mpirun cannot be kept on loopback.
    """
    given = " ".join(passed)
    # A process that is killed leaves its files behind: they belong in a folder that is removed.
    wanted = {"OMPI_MCA_orte_tmpdir_base": str(run_dir), "OMPI_MCA_btl_vader_backing_directory": str(run_dir)}
    if launcher == MPIRUN and environment.get("HVDTRAIN_LOOPBACK") != "0":
        # One host needs shared memory only. Open MPI's tcp and libfabric's ofi listen on the network, and so does cm.
        wanted |= {"OMPI_MCA_btl": "^openib,tcp,ofi,usnic,uct", "OMPI_MCA_pml": "ob1"}
        wanted |= {"LD_PRELOAD": _preload(environment.get("LD_PRELOAD")), "HVDTRAIN_LISTEN_ON": ""}
    elif _horovodrun_preloads(launcher, passed, environment):
        _preload(None)  # fail now, not after three restarts
    chosen = {}
    for name, text in wanted.items():
        parameter = name.partition("_MCA_")[2]
        if name in ("LD_PRELOAD", "HVDTRAIN_LISTEN_ON") or (
            name not in environment and f"mca {parameter} " not in given
        ):
            chosen[name] = text
    return chosen


def _horovodrun_preloads(launcher: str, passed: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether horovodrun will start an mpirun and keep it on loopback."""
    from hvdtrain.horovod_build import installed

    if launcher == MPIRUN or environment.get("HVDTRAIN_LOOPBACK") == "0" or "--gloo" in passed:
        return False
    own = value(passed, "--network-interfaces", "--network-interface") is not None
    return not own and "mpi" in str(installed.record().get("data_planes", "")).split(",")


def listening(hosts: Iterable[str], passed: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which mpirun, its daemons and ranks on several hosts listen at chosen interfaces alone.

    Args:
        hosts: theirs.
        passed: mpirun's options, which may choose interfaces.
        environment: the variables that are there, which may too.
    """
    from hvdtrain.horovod_build.added.horovod.runner.common.util import listen_on

    options = " ".join(passed)
    return listen_on.variables(_library(), listen_on.interfaces((), options, environment), hosts, options, environment)


def _library() -> str:
    from hvdtrain.horovod_build.installed import package_folder

    return str((package_folder("horovod") or Path("horovod")) / PRELOADED)


def _preload(before: str | None) -> str:
    from hvdtrain.horovod_build.added.horovod.runner.common.util import loopback

    try:
        return loopback.preload(_library(), before)
    except loopback.LoopbackError as problem:
        raise UsageError(str(problem)) from None
