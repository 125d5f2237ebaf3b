"""The hosts of a Slurm job, for a launcher whose command line names none."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping

from hvdtrain.errors import UsageError

_NODES, _NODE_COUNT, _TASKS = "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE"
_THIS_NODE = "SLURMD_NODENAME"  # not set where salloc was called, on a login node
_LIMIT_S = 30


def hosts(environment: Mapping[str, str]) -> dict[str, int]:
    """Return {host: tasks} of a Slurm job's nodes; {} elsewhere, and where this host is the only one of them.

    A single host needs no list: all ranks are started on it.
    """
    count = environment.get(_NODE_COUNT, "")
    nodes = environment.get(_NODES, "")
    here = (environment.get(_THIS_NODE) or socket.gethostname()).partition(".")[0]
    if not count.isdecimal() or (int(count) < 2 and nodes.partition(".")[0] == here):
        return {}
    # The tasks of each node: 2(x3),1 is 2, 2, 2, 1.
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get(_TASKS, ""))
    tasks = [int(number) for number, times in groups for _ in range(int(times or 1))]
    try:
        # By Slurm itself: n[1-3,7] has more than one grammar.
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as problem:
        raise UsageError(
            f"this Slurm job has {count} nodes, {nodes}, but `scontrol show hostnames` does not say which: "
            f"{problem}. Name them with -H host1:2,host2:2"
        ) from None
    names = done.stdout.split()
    if len(names) != len(tasks):
        raise UsageError(
            f"Slurm names {len(names)} nodes ({_NODES}={nodes}), but tasks for {len(tasks)} "
            f"({_TASKS}={environment.get(_TASKS, '')}). Name them with -H host1:2,host2:2"
        )
    return dict(zip(names, tasks, strict=True))


def check_ranks(ranks: int, given: Mapping[str, int]) -> None:
    """Raise a UsageError for more ranks than the job has tasks."""
    if ranks > sum(given.values()):
        raise UsageError(
            f"-np {ranks} is more than the {sum(given.values())} tasks of this Slurm job on {listed(given)}. "
            "Ask for more by sbatch --ntasks-per-node"
        )


def listed(given: Mapping[str, int]) -> str:
    """Return hosts as -H takes them."""
    return ",".join(f"{name}:{tasks}" for name, tasks in given.items())
