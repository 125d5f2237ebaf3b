"""The command line of `hvdtrain run`."""

from __future__ import annotations

import datetime
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from hvdtrain.run.arguments import Split
    from hvdtrain.run.supervise import Options

_SPLIT = "hvdtrain.run.split"


class RunCommand(TyperCommand):
    """Keeps its own options and hands every other one to the launcher, as it was written."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the command line apart, and read our options alone."""
        from hvdtrain.run import arguments

        try:
            parts = arguments.split(args)
        except arguments.UsageError as error:
            _refuse(error)
        ctx.meta[_SPLIT] = parts
        return super().parse_args(ctx, parts.ours if args else ["--help"])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Say what may stand where."""
        return ["-np N", "[OPTIONS]", "[ANY OPTION OF horovodrun]", "[python] train.py [ARGS]..."]


def run(
    ctx: typer.Context,
    ranks: Annotated[str | None, typer.Option("-np", "--num-proc", help="Number of ranks.")] = None,
    max_restarts: Annotated[
        str, typer.Option(metavar="K", help="Start the job anew so often when it fails; 0 for never.")
    ] = "3",
    grace: Annotated[
        str,
        typer.Option(metavar="SECONDS", help="After SIGTERM, SIGINT or SIGUSR1: what ranks get to write a checkpoint."),
    ] = "30",
    launcher: Annotated[str, typer.Option(help="What starts the ranks: horovodrun or mpirun.")] = "horovodrun",
) -> None:
    """Run a script on several ranks, and start it anew from its checkpoint when a process dies.

    Exit status: 0, every rank ended well; 75, stopped on request, run it again to go on; 2, a wrong command
    line; else that of the rank that failed first, 128 + n for signal n.

    Example: hvdtrain run -np 4 train.py --epochs 90
    """
    from hvdtrain.run import arguments, supervise

    parts: Split = ctx.meta[_SPLIT]
    try:
        options, run_dir = _prepare(parts, ranks, max_restarts, grace, launcher)
    except arguments.UsageError as error:
        _refuse(error)
    raise typer.Exit(supervise.run(options, run_dir))


def _prepare(parts: Split, ranks: str | None, max_restarts: str, grace: str, launcher: str) -> tuple[Options, Path]:
    """Check everything that can be checked before anything is started, and return what to run.

    Raises:
        UsageError: what was asked for cannot be done.
    """
    from hvdtrain import launcher as around
    from hvdtrain import start, tuning
    from hvdtrain.run import allocation, arguments, loopback, supervise

    if launcher not in (arguments.HOROVODRUN, arguments.MPIRUN):
        raise arguments.UsageError(f"--launcher must be horovodrun or mpirun. Received: --launcher {launcher}")
    if ranks is None:
        raise arguments.UsageError("say how many ranks: hvdtrain run -np 2 train.py")
    count = arguments.whole_number("-np", ranks, least=1)
    restarts = arguments.whole_number("--max-restarts", max_restarts, least=0)
    grace_s = arguments.seconds("--grace", grace)
    found = around.detect()
    if found and found.size and found.size > 1 and found.name != "Slurm":
        raise arguments.UsageError(f"it starts the ranks itself, and {found} has started this one. Run it by itself")
    program = arguments.program(parts.program)
    slots = arguments.hosts(parts.passed)
    elastic = arguments.value(parts.passed, "--host-discovery-script", "--min-np", "--min-num-proc") is not None
    given = {} if slots or elastic else allocation.hosts(os.environ)
    if given:
        allocation.check_ranks(count, given)
    crowded = arguments.check_ranks(count, slots=slots or given, elastic=elastic, cores=tuning.usable_cores())
    if importlib.util.find_spec("horovod") is None:
        raise arguments.UsageError("Horovod is not installed, so no ranks can be started. Run `hvdtrain build`")
    first = [found_mpirun] if launcher == arguments.MPIRUN and (found_mpirun := shutil.which("mpirun")) else []
    if launcher == arguments.MPIRUN and not first:
        raise arguments.UsageError("there is no mpirun on PATH. Install Open MPI, or leave --launcher out")
    line = [*(first or start.horovodrun(Path(sys.executable))), "-np", str(count), *parts.passed]
    if given and launcher == arguments.HOROVODRUN:  # mpirun asks Slurm itself
        line += ["-H", allocation.listed(given)]
    if elastic and launcher == arguments.HOROVODRUN:
        line += loopback.elastic_flags(parts.passed)
    if crowded:
        supervise.say(crowded)
    run_dir = supervise.make_run_dir()
    # All starts of a job are one run: `hvdtrain.callbacks.RunFolder` keeps them in one folder.
    script = next((Path(word).stem for word in program if word.endswith(".py")), Path(program[0]).stem)
    environment = _environment(launcher, parts.passed)
    environment.setdefault("HVDTRAIN_RUN_NAME", f"{script}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{run_dir.name[-4:]}")
    if not elastic and loopback.is_here(slots or given):
        environment |= loopback.settings(run_dir, launcher, parts.passed, environment)
    far = launcher == arguments.MPIRUN and bool(slots) and not any(loopback.is_here([host]) for host in slots)
    return supervise.Options([*line, *program], environment, restarts, grace_s, elastic, far), run_dir


def _environment(launcher: str, passed: Sequence[str]) -> dict[str, str]:
    """Return the environment for a launcher with the options `passed`."""
    from hvdtrain import start
    from hvdtrain.run import arguments

    environment = start.rank_environment({})
    # A rank that failed has failed the others too: none of them has anything to wait for.
    environment.setdefault("OMPI_MCA_odls_base_sigkill_timeout", "0")
    if launcher == arguments.MPIRUN:  # as horovodrun does it: containers run as root, and `init` shares cores out
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if not arguments.places_ranks(passed):
            environment.setdefault("OMPI_MCA_hwloc_base_binding_policy", "none")
    return environment


def _refuse(error: Exception) -> NoReturn:
    typer.echo(f"hvdtrain run: {error}", err=True)
    raise typer.Exit(2)
