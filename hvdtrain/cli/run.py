"""The command line of `hvdtrain run`."""

from __future__ import annotations

import functools
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hvdtrain.cli.shared import Command, Debug
from hvdtrain.errors import UsageError
from hvdtrain.system.settings import RUN_NAME

if TYPE_CHECKING:
    from hvdtrain.launch.arguments import Split
    from hvdtrain.launch.config_file import Settings
    from hvdtrain.launch.supervisor import Options

_SPLIT = "hvdtrain.launch.split"
_READ = "hvdtrain.launch.read"


class RunCommand(Command):
    """Keeps its own options and hands every other one to the launcher, as it was written."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the command line apart, and read our options alone."""
        from hvdtrain.launch import arguments, config_file

        read = functools.lru_cache(config_file.read)  # once: it may be a pipe
        try:
            parts = arguments.split(args, launcher_in=lambda file: read(file).launcher)
        except UsageError:
            if not ctx.resilient_parsing:
                raise
            parts = arguments.Split()  # a shell asks what may follow what is not whole yet
        ctx.meta[_SPLIT], ctx.meta[_READ] = parts, read
        return super().parse_args(ctx, parts.ours)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Say what may stand where."""
        return ["-np N", "[OPTIONS]", "[ANY OPTION OF horovodrun]", "[python] train.py [ARGS]..."]


def run(
    ctx: typer.Context,
    ranks: Annotated[str | None, typer.Option("-np", "--num-proc", metavar="N", help="Number of ranks.")] = None,
    max_restarts: Annotated[
        str | None,
        typer.Option(metavar="K", help="Start the job anew so often when it fails; 0 for never.  [default: 3]"),
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS",
            help="After SIGTERM, SIGINT or SIGUSR1: what ranks get to write a checkpoint.  [default: 30]",
        ),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="horovodrun|mpirun",
            help="What starts the ranks.  [default: horovodrun]",
            autocompletion=lambda incomplete: [n for n in ("horovodrun", "mpirun") if n.startswith(incomplete)],
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="Take what is not on the command line from this YAML file.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Run a script on several ranks, and go on when a process dies.

    What is left of a job that failed is ended, and it is started anew; a script with a checkpoint goes on from it.
    `hvdtrain --help` lists the exit statuses.

    Keys of the file: np, hosts, max-restarts, grace, launcher, launcher-options, environment, script, arguments.
    The command line wins; arguments of the script alone are added to the file's after --.

    Example: hvdtrain run -np 4 train.py --epochs 90

    Example: hvdtrain run --config train.yaml -np 2 -- --epochs 1
    """
    from hvdtrain.launch import job_folder, supervisor
    from hvdtrain.launch.config_file import DEFAULTS, Settings

    parts: Split = ctx.meta[_SPLIT]
    typed = Settings(ranks, max_restarts, grace, launcher, parts.passed, program=parts.program)
    settings = typed.over(ctx.meta[_READ](config)) if config is not None else typed
    settings = settings.over(DEFAULTS)
    os.environ.update(settings.environment)  # as if it had been set before the command
    with job_folder.removed_at_the_end():
        options, run_dir = _prepare(settings)
        _keep(settings, options)
        raise typer.Exit(supervisor.run(options, run_dir))


def _keep(settings: Settings, options: Options) -> None:
    """Say what is run, and write it into the run's folder."""
    from hvdtrain.launch import config_file, supervisor

    try:
        # The folder that `hvdtrain.callbacks.RunFolder` takes.
        path = config_file.keep(
            settings,
            runs=options.environment.get("HVDTRAIN_RUNS", "runs"),
            name=options.environment[RUN_NAME],
        )
        where = f" (kept in {path})" if path else ""
    except OSError as problem:
        where = f" (not kept: {problem})"
    supervisor.say(f"{settings}{where}")


def _prepare(settings: Settings) -> tuple[Options, Path]:
    """Check everything that can be checked before anything is started, and return what to run.

    Raises:
        UsageError: what was asked for cannot be done.
    """
    from hvdtrain.distributed import tuning
    from hvdtrain.launch import arguments, job_environment, job_folder, loopback, other_hosts, slurm, supervisor

    launcher, passed = settings.launcher, settings.options
    if launcher not in (arguments.HOROVODRUN, arguments.MPIRUN):
        raise UsageError(f"--launcher must be horovodrun or mpirun. Received: --launcher {launcher}")
    if settings.ranks is None:
        raise UsageError("say how many ranks: hvdtrain run -np 2 train.py")
    count = arguments.whole_number("-np", settings.ranks, least=1)
    restarts = arguments.whole_number("--max-restarts", settings.max_restarts, least=0)
    grace_s = arguments.seconds("--grace", settings.grace or "")
    job_environment.check_place()
    program = arguments.program(settings.program)
    slots = arguments.hosts(passed)
    elastic = arguments.value(passed, "--host-discovery-script", "--min-np", "--min-num-proc") is not None
    given = {} if slots or elastic else slurm.hosts(os.environ)
    if given:
        slurm.check_ranks(count, given)
    hosts = slots or given
    crowded = arguments.check_ranks(count, slots=hosts, elastic=elastic, cores=tuning.usable_cores())
    if crowded:
        supervisor.say(crowded)
    job_environment.check_host(launcher, count if loopback.is_here(hosts) else 0)
    over_gloo = elastic or (launcher == arguments.HOROVODRUN and "--gloo" in passed)
    run_dir, elsewhere = job_folder.make(0 if over_gloo else count)
    if elsewhere:
        supervisor.say(elsewhere)
    script = next((Path(word).stem for word in program if word.endswith(".py")), Path(program[0]).stem)
    environment = job_environment.environment(
        run_dir, name=script, launcher=launcher, passed=passed, slots=hosts, elastic=elastic
    )
    line = [*_launcher(launcher), "-np", str(count), *arguments.marks(launcher, passed, environment), *passed]
    if launcher == arguments.MPIRUN and not loopback.is_here(slots):
        line += other_hosts.exports(passed, environment)
    named = arguments.value(passed, "-H", "--hosts") or ""
    # mpirun asks Slurm itself, and takes a host without a number.
    if launcher == arguments.HOROVODRUN and (given or any(":" not in item for item in named.split(",") if item)):
        line += ["-H", slurm.listed(hosts)]
    flags = loopback.elastic_flags(passed) if launcher == arguments.HOROVODRUN and elastic else []
    line += flags
    here = bool(flags) if elastic and not hosts else loopback.is_here(hosts)
    is_known = not elastic and (launcher == arguments.HOROVODRUN or other_hosts.fills_in_order(passed))
    options = supervisor.Options(
        [*line, *program], environment, restarts, grace_s, elastic,
        far=bool(hosts) and not any(loopback.is_here([host]) for host in hosts),
        way=None if elastic else other_hosts.way(hosts, launcher, passed, environment),
        by_rank=() if here else other_hosts.by_rank(hosts, count, own=socket.gethostname(), is_known=is_known),
    )  # fmt: skip
    return options, run_dir


def _launcher(name: str) -> list[str]:
    from hvdtrain.launch import arguments
    from hvdtrain.system import open_mpi, start_ranks

    if name == arguments.HOROVODRUN:
        return start_ranks.horovodrun(Path(sys.executable))
    found = open_mpi.program(name)
    if found is None:
        raise UsageError("there is no mpirun on PATH. Try: pip install 'hvdtrain[mpi]', or leave --launcher out")
    return [found]
