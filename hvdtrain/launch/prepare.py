"""Check what `hvdtrain run` is to start, and work out the command line and the environment."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from hvdtrain.distributed import tuning
from hvdtrain.errors import UsageError
from hvdtrain.launch import arguments, job_environment, job_folder, loopback, other_hosts, slurm
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.launch.config_file import Settings
from hvdtrain.launch.job import Launch
from hvdtrain.launch.supervisor import say
from hvdtrain.system import network, open_mpi, start_ranks


def prepare(settings: Settings) -> tuple[Launch, Path]:
    """Return what to run, and its folder; a UsageError if the settings cannot be satisfied."""
    if settings.launcher not in (arguments.HOROVODRUN, arguments.MPIRUN):
        raise UsageError(f"--launcher must be horovodrun or mpirun. Received: --launcher {settings.launcher}")
    if settings.ranks is None:
        raise UsageError("say how many ranks: hvdtrain run -np 2 train.py")
    ranks = arguments.whole_number("-np", settings.ranks, least=1)
    max_restarts = arguments.whole_number("--max-restarts", settings.max_restarts, least=0)
    grace_s = arguments.seconds("--grace", settings.grace or "")
    job_environment.check_place()
    program = arguments.program(settings.program)
    options = settings.options
    named = arguments.hosts(options)
    elastic = arguments.value(options, "--host-discovery-script", "--min-np", "--min-num-proc") is not None
    given = {} if named or elastic else slurm.hosts(os.environ)
    if given:
        slurm.check_ranks(ranks, given)
    spec = LaunchSpec(settings.launcher, ranks, options, named or given, elastic, program)
    crowded = arguments.check_ranks(ranks, slots=spec.hosts, elastic=elastic, cores=tuning.usable_cores())
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
            raise UsageError("there is no mpirun on PATH. Try: pip install 'hvdtrain[mpi]', or leave --launcher out")
        flags += other_hosts.exports(spec, environment) if not network.is_here(named) else []
    else:
        launcher = start_ranks.horovodrun(Path(sys.executable))
        # mpirun reads Slurm's hosts itself, and accepts a host without a number.
        listed = (spec.option("-H", "--hosts") or "").split(",")
        flags += ["-H", slurm.listed(spec.hosts)] if given or any(":" not in host for host in listed if host) else []
        flags += loopback.elastic_flags(options) if elastic else []
    marks = arguments.marks(spec.launcher, options, environment)
    is_here = "--network-interfaces" in flags if elastic and not spec.hosts else spec.is_here
    return Launch(
        spec,
        [*launcher, "-np", str(ranks), *marks, *options, *flags, *program],
        environment,
        max_restarts,
        grace_s,
        ssh=other_hosts.ssh_route(spec, environment),
        by_rank=() if is_here else other_hosts.by_rank(spec, own=socket.gethostname()),
    ), run_dir
