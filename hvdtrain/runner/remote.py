"""What a job needs that has ranks on other hosts: which rank is where, the environment there, and the way to them."""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import itertools
import re
import shlex
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.runner import arguments, loopback
from hvdtrain.runner.family import RUN_DIR

# What belongs to one host, or to one session on it.
_OWN = re.compile(
    r"BASH_FUNC_|SLURM|SBATCH_|PBS_|LSB_|SSH_|XDG_|DBUS_|PMIX_|OMPI_COMM_|(.*CUDA_VISIBLE_DEVICES|HOSTNAME|PWD|OLDPWD|"
    r"SHLVL|TERM|DISPLAY|TMPDIR|_)$"
)
# Another way of starting something on other hosts than ssh, which Open MPI takes where it finds one of them.
_SCHEDULERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm")
_SSH_LIMIT_S = 10
# Options of mpirun's with which it does not fill one host after the other.
_MAPPING = {"map-by", "rank-by", "rf", "rankfile", "ppr", "npersocket", "npernode", "pernode", "bynode", "N"}
# Seconds of silence, between two questions, and how many go unanswered. Open MPI's own are 300, 20 and 9.
_KEEPALIVE = {"time": "10", "intvl": "5", "probes": "4"}
# What Open MPI leaves out by itself; Docker's and libvirt's bridges, which hosts may have that this one is none of.
_NEVER = ("127.0.0.1/8", "sppp")
_BRIDGES = (ipaddress.IPv4Network("172.17.0.0/16"), ipaddress.IPv4Network("192.168.122.0/24"))


@dataclass(frozen=True)
class Way:
    """How other hosts are reached.

    Attributes:
        hosts: their names.
        ssh: the command line as the launcher has it, without the host.
    """

    hosts: tuple[str, ...]
    ssh: tuple[str, ...]


def way(hosts: Mapping[str, int], launcher: str, passed: Sequence[str], environment: Mapping[str, str]) -> Way | None:
    """Return how the launcher reaches the other ones of `hosts`; None where there are none, or it is not by ssh.

    Args:
        hosts: {host: slots}.
        launcher: "horovodrun" or "mpirun".
        passed: its options.
        environment: its environment.
    """
    others = tuple(host for host in hosts if not loopback.is_here([host]))
    limits = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_LIMIT_S}")
    if not others or "OMPI_MCA_plm_rsh_agent" in environment:
        return None
    if launcher == arguments.HOROVODRUN:
        port, key = (arguments.value(passed, *names) for names in (("-p", "--ssh-port"), ("-i", "--ssh-identity-file")))
        options = [*(("-p", port) if port else ()), *(("-i", key) if key else ())]
        return Way(others, ("ssh", *limits, "-o", "StrictHostKeyChecking=no", *options))
    if any(name in environment for name in _SCHEDULERS) or {"plm", "plm_rsh_agent", "launch-agent"} & _names(passed):
        return None
    given = _parameter("plm_rsh_args", passed) or environment.get("OMPI_MCA_plm_rsh_args", "")
    return Way(others, ("ssh", "-x", *shlex.split(given), *limits))


def _names(passed: Sequence[str]) -> set[str]:
    return {word.lstrip("-") for word in passed}


def _parameter(name: str, passed: Sequence[str]) -> str | None:
    """Return what `--mca NAME VALUE` says."""
    return next((passed[i + 1] for i, word in enumerate(passed[:-1]) if word == name), None)


def exports(passed: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the options with which mpirun takes this environment to other hosts, as horovodrun does.

    ssh brings nothing along, and ranks with other settings than rank 0's disagree or hang.
    """
    if "mca_base_env_list" in _names(passed):  # the user's own list, beside which mpirun takes no -x
        return []
    given = {text.partition("=")[0] for option, text in itertools.pairwise(passed) if option in ("-x", "--x")}
    names = sorted(name for name in {*environment, RUN_DIR} if name not in given and not _OWN.match(name))
    return [word for name in names for word in ("-x", name)]


def keepalive() -> dict[str, str]:
    """Return settings with which mpirun ends a job half a minute after a host's network has gone, not ten minutes."""
    return {f"OMPI_MCA_oob_tcp_keepalive_{name}": value for name, value in _KEEPALIVE.items()}


def without_bridges(hosts: Iterable[str], passed: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return settings with which ranks under mpirun leave bridges of this host alone, such as Docker's.

    Every host has one with the same address, and Open MPI takes it for a way to the others, for which ranks then wait.
    Its daemons try one address after the other. horovodrun tries by itself which interfaces lead to other hosts.

    Args:
        hosts: of the job. A network that one of them is in is kept.
        passed: the options of mpirun.
        environment: its environment.
    """
    if any("btl_tcp_if_" in word for word in (*passed, *environment)):
        return {}
    addresses = []
    for host in hosts:
        with contextlib.suppress(OSError):
            addresses.append(ipaddress.ip_address(socket.gethostbyname(host)))
    bridges = {net for net in (*_BRIDGES, *_own_bridges()) if not any(address in net for address in addresses)}
    return {"OMPI_MCA_btl_tcp_if_exclude": ",".join([*_NEVER, *sorted(str(net) for net in bridges)])}


def _own_bridges() -> list[ipaddress.IPv4Network]:
    psutil = importlib.import_module("psutil")
    return [
        ipaddress.IPv4Network(f"{address.address}/{address.netmask}", strict=False)
        for name, addresses in psutil.net_if_addrs().items()
        if Path("/sys/class/net", name, "bridge").exists()
        for address in addresses
        if address.family == socket.AF_INET
    ]


def fills_in_order(passed: Sequence[str]) -> bool:
    """Return whether mpirun, with these options, fills one host after the other with ranks, as horovodrun does."""
    return not _names(passed) & _MAPPING or arguments.value(passed, "-map-by", "--map-by") == "slot"


def by_rank(hosts: Mapping[str, int], ranks: int, *, own: str, is_known: bool) -> tuple[str, ...]:
    """Return the host of each rank, "" where it is not known.

    Args:
        hosts: {host: slots}, filled one after the other.
        ranks: how many.
        own: this host's name for itself.
        is_known: whether ranks are where `hosts` says: a launcher may be told otherwise, and elastic hosts change.
    """
    filled = [own if loopback.is_here([host]) else host for host, slots in hosts.items() for _ in range(slots)]
    return tuple(filled[:ranks]) if is_known else ("",) * ranks
