"""Keep what Open MPI listens at to the chosen interfaces of a job's hosts, wherever it runs on several of them."""

from __future__ import annotations

import importlib
import ipaddress
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping

from . import loopback

VARIABLE = "HVDTRAIN_LISTEN_ON"  # what libhvdtrain_listen.so reads
# Settings of Open MPI 4 and 5: which interfaces ranks use, and which its daemons.
_RANKS, _DAEMONS = "btl_tcp_if_include", ("oob_tcp_if_include", "prte_if_include")
_AGENTS = {"orted": "OMPI_MCA_orte_launch_agent", "prted": "PRTE_MCA_prte_launch_agent"}
# With one of these Open MPI starts its daemons by something else than ssh, which takes the environment along.
_SCHEDULERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "OMPI_MCA_plm", "PRTE_MCA_plm")
_OF = ("OMPI", "PRTE")
_ANY_PORT = 9
_LIMIT_S = 10


def interfaces(nics: Iterable[str], options: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the interfaces, as names or networks, that a job's ranks and mpirun's daemons use; () for all.

    Args:
        nics: those that the launcher has found, or was given.
        options: mpirun's further options.
        environment: mpirun's.
    """
    chosen = {*nics, *_given((_RANKS,), options, environment)}
    # Daemons may have a network of their own. Alone it says nothing of the ranks'.
    return tuple(sorted(chosen | _given(_DAEMONS, options, environment) | _in_files(environment))) if chosen else ()


def _in_files(environment: Mapping[str, str]) -> set[str]:
    """Return the interfaces that Open MPI 4's own files give to its daemons."""
    command = ["ompi_info", "--parsable", "--level", "9", "--param", "oob", "tcp"]
    try:
        done = subprocess.run(
            command, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return set()
    found = re.search(r"oob_tcp_if_include:value:(\S+)", done.stdout)
    return set(found[1].split(",")) if found else set()


def _given(names: Iterable[str], options: str, environment: Mapping[str, str]) -> set[str]:
    texts = [
        text
        for name in names
        for text in (*re.findall(rf"mca {name} (\S+)", options), *(environment.get(f"{p}_MCA_{name}", "") for p in _OF))
    ]
    return {word for text in texts for word in text.split(",") if word}


def variables(
    library: str, chosen: Collection[str], hosts: Iterable[str], options: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return what mpirun's environment needs further; {} where Open MPI is to listen on every interface.

    A job that ran before runs, so what keeps it from listening on the chosen interfaces alone is told in one line.

    Args:
        library: the path of libhvdtrain_listen.so, on every host.
        chosen: what `interfaces` returned.
        hosts: the job's hosts.
        options: mpirun's further options.
        environment: mpirun's so far.
    """
    if not chosen or environment.get("HVDTRAIN_LOOPBACK") == "0":
        return {}
    listed = ",".join(chosen)
    why = _why_not(chosen, hosts)
    if any(name in environment for name in _AGENTS.values()) or re.search("launch[-_]agent", options):
        why = why or "its daemons are started by a launch agent of yours"
    if shlex.quote(library) != library:
        why = why or f"no shell and no LD_PRELOAD takes {library!r} as it is"
    if not why:
        try:
            preload = loopback.preload(library, environment.get("LD_PRELOAD"))
        except loopback.LoopbackError as problem:
            why = problem.why
    if why:
        sys.stderr.write(f"hvdtrain: Open MPI listens on every network interface of this job's hosts: {why}\n")
        return {}
    is_ssh = not any(name in environment for name in _SCHEDULERS)
    agents = {name: _agent(library, listed, daemon) for daemon, name in _AGENTS.items() if is_ssh}
    return {"LD_PRELOAD": preload, VARIABLE: listed, **agents}


def _agent(library: str, listed: str, daemon: str) -> str:
    """Return the command by which ssh starts a daemon: with the library where it is there, else with a line about it.

    Open MPI splits it at spaces, and may put it between double quotes: nothing in it may need those, or be expanded.
    """
    said = f"hvdtrain: Open MPI listens on every network interface of a host without {library}: "
    tell = f"uname -n | sed 's|^|{said}|' 1>&2"
    return f"test -r {library} && export LD_PRELOAD={library} {VARIABLE}={listed} || {tell} ; {daemon}"


def _why_not(chosen: Collection[str], hosts: Iterable[str]) -> str:
    """Return why mpirun on this host should not be kept to the chosen interfaces, "" if it may be."""
    listed = ",".join(chosen)
    if shlex.quote(listed) != listed:
        return f"{listed!r} is no list of interfaces"
    own = _own(chosen)
    if not own:
        return f"this host has no address on {listed}"
    # What was chosen leads from host to host. From a host that is none of them it may lead elsewhere.
    ways = [_way_to(host) for host in hosts]
    if not any(is_here for _, is_here in ways) and not {address for address, _ in ways} <= set(own):
        return f"this host, which is none of them, does not reach them by {listed}"
    return ""


def _own(chosen: Collection[str]) -> list[str]:
    """Return this host's addresses on the chosen interfaces."""
    psutil = importlib.import_module("psutil")
    addresses = [
        (name, each.address)
        for name, found in psutil.net_if_addrs().items()
        for each in found
        if each.family == socket.AF_INET
    ]
    return [address for name, address in addresses if any(word == name or _holds(word, address) for word in chosen)]


def _holds(network: str, address: str) -> bool:
    try:
        return "/" in network and ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def _way_to(host: str) -> tuple[str, bool]:
    """Return the address from which this host reaches another one, "" if none, and whether that is itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # which sends nothing
        try:
            probe.connect((host, _ANY_PORT))
        except OSError:
            return "", False
        return probe.getsockname()[0], probe.getsockname()[0] == probe.getpeername()[0]
