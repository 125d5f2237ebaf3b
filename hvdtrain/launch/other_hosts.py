"""What a job needs that has ranks on other hosts: which rank is where, the environment there, and the way to them."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.launch import arguments, loopback
from hvdtrain.system import open_mpi
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
_SSH_LIMIT_S = 10
# Options of mpirun's with which it does not fill one host after the other.
_MAPPING = {"map-by", "rank-by", "rf", "rankfile", "ppr", "npersocket", "npernode", "pernode", "bynode", "N"}
# Seconds of silence, between two questions, and how many go unanswered. Open MPI's own are 300, 20 and 9.
_KEEPALIVE = {"time": "10", "intvl": "5", "probes": "4"}
# A rank whose peer was killed loses its connection to it, and aborts. If it is faster than the news of the killed rank,
# mpirun blames the survivor: 5 names neither the killed rank nor its signal then. Wait for the news, and be killed.
_ABORT_DELAY = {"OMPI_MCA_opal_abort_delay": "3"}  # seconds


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
    environment = open_mpi.for_both(environment)
    others = tuple(host for host in hosts if not loopback.is_here([host]))
    limits = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_LIMIT_S}")
    if not others or "PRTE_MCA_plm_ssh_agent" in environment:
        return None
    if launcher == arguments.HOROVODRUN:
        port, key = (arguments.value(passed, *names) for names in (("-p", "--ssh-port"), ("-i", "--ssh-identity-file")))
        options = [*(("-p", port) if port else ()), *(("-i", key) if key else ())]
        return Way(others, ("ssh", *limits, "-o", "StrictHostKeyChecking=accept-new", *options))
    others_ways = {"plm", "plm_rsh_agent", "plm_ssh_agent", "launch-agent"}
    if any(name in environment for name in _SCHEDULERS) or others_ways & _names(passed):
        return None
    given = _parameter(("plm_rsh_args", "plm_ssh_args"), passed) or environment.get("PRTE_MCA_plm_ssh_args", "")
    return Way(others, ("ssh", "-x", *shlex.split(given), *limits))


def _names(passed: Sequence[str]) -> set[str]:
    return {word.lstrip("-") for word in passed}


def _parameter(names: Sequence[str], passed: Sequence[str]) -> str | None:
    """Return what `--mca NAME VALUE` says, for one of `names`."""
    return next((passed[i + 1] for i, word in enumerate(passed[:-1]) if word in names), None)


def exports(passed: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the options with which mpirun takes this environment to other hosts, as horovodrun does.

    ssh brings nothing along, and ranks with other settings than rank 0's disagree or hang.
    """
    if "mca_base_env_list" in _names(passed):  # the user's own list, beside which mpirun takes no -x
        return []
    given = {text.partition("=")[0] for option, text in itertools.pairwise(passed) if option in ("-x", "--x")}
    # What is preloaded for this job alone comes with mpirun's daemons, where it is there.
    if environment.get("LD_PRELOAD", "").endswith(loopback.PRELOADED.name):
        given.add("LD_PRELOAD")
    names = sorted(name for name in {*environment, RUN_DIR} if name not in given and not _OWN.match(name))
    return [word for name in names for word in ("-x", name)]


def settings() -> dict[str, str]:
    """Return settings with which mpirun names who failed first, and notices a host's loss within half a minute."""
    return {**{f"OMPI_MCA_oob_tcp_keepalive_{name}": value for name, value in _KEEPALIVE.items()}, **_ABORT_DELAY}


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
