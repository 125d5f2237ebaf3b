"""What a job needs that has ranks on other hosts: which rank is where, the environment there, and the route to them."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.launch import loopback
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.system import network, open_mpi
from hvdtrain.system.process_tree import RUN_DIR

# What belongs to one host, or to one session on it.
_OWN = re.compile(
    r"BASH_FUNC_|SLURM|SBATCH_|PBS_|LSB_|SSH_|XDG_|DBUS_|PMIX_|OMPI_COMM_|PRTE_LAUNCHED|"
    r"(.*CUDA_VISIBLE_DEVICES|HOSTNAME|PWD|OLDPWD|SHLVL|TERM|DISPLAY|TMPDIR|_)$"
)
# Another way of starting something on other hosts than ssh, which Open MPI takes where it finds one of them.
_SCHEDULERS = (
    "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "OMPI_MCA_plm", "PRTE_MCA_plm", "PRTE_MCA_plm_ssh_agent",
)  # fmt: skip
_OTHER_ROUTES = {"plm", "plm_rsh_agent", "plm_ssh_agent", "launch-agent"}
_SSH_LIMIT_S = 10
# Options of mpirun's with which it does not fill one host after the other.
_MAPPING = {"map-by", "rank-by", "rf", "rankfile", "ppr", "npersocket", "npernode", "pernode", "bynode", "N"}
# Seconds of silence, between two questions, and how many go unanswered. Open MPI's own are 300, 20 and 9.
_KEEPALIVE = {"time": "10", "intvl": "5", "probes": "4"}
# A rank whose peer was killed loses its connection to it, and aborts. If it is faster than the news of the killed rank,
# mpirun blames the survivor: 5 names neither the killed rank nor its signal then. Wait for the news, and be killed.
_ABORT_DELAY = {"OMPI_MCA_opal_abort_delay": "3"}  # seconds


@dataclass(frozen=True)
class SshRoute:
    """How other hosts are reached: by the launcher's own ssh command line, without the host."""

    hosts: tuple[str, ...]
    ssh: tuple[str, ...]


def ssh_route(spec: LaunchSpec, environment: Mapping[str, str]) -> SshRoute | None:
    """Return how the launcher reaches other hosts than this one; None where there are none, or it is not by ssh."""
    environment = open_mpi.for_both(environment)
    others = () if spec.elastic else tuple(host for host in spec.hosts if not network.is_here([host]))
    limits = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_LIMIT_S}")
    if not others or "PRTE_MCA_plm_ssh_agent" in environment:
        return None
    if not spec.is_mpirun:
        port, key = spec.option("-p", "--ssh-port"), spec.option("-i", "--ssh-identity-file")
        options = [*(("-p", port) if port else ()), *(("-i", key) if key else ())]
        return SshRoute(others, ("ssh", *limits, "-o", "StrictHostKeyChecking=accept-new", *options))
    if any(name in environment for name in _SCHEDULERS) or _OTHER_ROUTES & spec.option_names():
        return None
    words = itertools.pairwise(spec.options)
    given = next((text for name, text in words if name in ("plm_rsh_args", "plm_ssh_args")), None)
    given = given or environment.get("PRTE_MCA_plm_ssh_args", "")
    return SshRoute(others, ("ssh", "-x", *shlex.split(given), *limits))


def exports(spec: LaunchSpec, environment: Mapping[str, str]) -> list[str]:
    """Return the options with which mpirun takes this environment to other hosts, as horovodrun does: ssh does not."""
    if "mca_base_env_list" in spec.option_names():  # the user's own list, beside which mpirun takes no -x
        return []
    given = {text.partition("=")[0] for option, text in itertools.pairwise(spec.options) if option in ("-x", "--x")}
    # What is preloaded for this job alone comes with mpirun's daemons, where it is there.
    if environment.get("LD_PRELOAD", "").endswith(loopback.PRELOADED.name):
        given.add("LD_PRELOAD")
    names = sorted(name for name in {*environment, RUN_DIR} if name not in given and not _OWN.match(name))
    return [word for name in names for word in ("-x", name)]


def settings() -> dict[str, str]:
    """Return settings with which mpirun names the first rank that failed, and detects a lost host in half a minute."""
    return {**{f"OMPI_MCA_oob_tcp_keepalive_{name}": value for name, value in _KEEPALIVE.items()}, **_ABORT_DELAY}


def by_rank(spec: LaunchSpec, *, own: str) -> tuple[str, ...]:
    """Return the host of each rank, "" where it is not known; `own` is this host's name for itself."""
    # Elastic hosts change. mpirun's options may say that it does not fill one host after the other, as horovodrun does.
    otherwise = spec.option_names() & _MAPPING and spec.option("-map-by", "--map-by") != "slot"
    if spec.elastic or (spec.is_mpirun and otherwise):
        return ("",) * spec.ranks
    filled = [own if network.is_here([host]) else host for host, slots in spec.hosts.items() for _ in range(slots)]
    return tuple(filled[: spec.ranks])
