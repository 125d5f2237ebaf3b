"""The command line of `hvdtrain run`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.runner.arguments import Split
    from hvdtrain.runner.supervise import Options

_SPLIT = "hvdtrain.runner.split"


class RunCommand(TyperCommand):
    """Keeps its own options and hands every other one to the launcher, as it was written."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the command line apart, and read our options alone."""
        from hvdtrain.runner import arguments

        try:
            parts = arguments.split(args)
        except UsageError as error:
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
    from hvdtrain.runner import supervise

    parts: Split = ctx.meta[_SPLIT]
    try:
        options, run_dir = _prepare(parts, ranks, max_restarts, grace, launcher)
    except UsageError as error:
        _refuse(error)
    raise typer.Exit(supervise.run(options, run_dir))


def _prepare(parts: Split, ranks: str | None, max_restarts: str, grace: str, launcher: str) -> tuple[Options, Path]:
    """Check everything that can be checked before anything is started, and return what to run.

    Raises:
        UsageError: what was asked for cannot be done.
    """
    from hvdtrain import start, tuning
    from hvdtrain.runner import arguments, loopback, supervise, surroundings

    if launcher not in (arguments.HOROVODRUN, arguments.MPIRUN):
        raise UsageError(f"--launcher must be horovodrun or mpirun. Received: --launcher {launcher}")
    if ranks is None:
        raise UsageError("say how many ranks: hvdtrain run -np 2 train.py")
    count = arguments.whole_number("-np", ranks, least=1)
    restarts = arguments.whole_number("--max-restarts", max_restarts, least=0)
    grace_s = arguments.seconds("--grace", grace)
    surroundings.check_place()
    program = arguments.program(parts.program)
    slots = arguments.hosts(parts.passed)
    elastic = arguments.value(parts.passed, "--host-discovery-script", "--min-np", "--min-num-proc") is not None
    crowded = arguments.check_ranks(count, slots=slots, elastic=elastic, cores=tuning.usable_cores())
    first = [found_mpirun] if launcher == arguments.MPIRUN and (found_mpirun := shutil.which("mpirun")) else []
    if launcher == arguments.MPIRUN and not first:
        raise UsageError("there is no mpirun on PATH. Install Open MPI, or leave --launcher out")
    line = [*(first or start.horovodrun(Path(sys.executable))), "-np", str(count), *parts.passed]
    if elastic and launcher == arguments.HOROVODRUN:
        line += loopback.elastic_flags(parts.passed)
    if crowded:
        supervise.say(crowded)
    run_dir = supervise.make_run_dir()
    script = next((Path(word).stem for word in program if word.endswith(".py")), Path(program[0]).stem)
    environment = surroundings.environment(
        run_dir, name=script, launcher=launcher, passed=parts.passed, slots=slots, elastic=elastic
    )
    return supervise.Options([*line, *program], environment, restarts, grace_s, elastic), run_dir


def _refuse(error: Exception) -> NoReturn:
    typer.echo(f"hvdtrain run: {error}", err=True)
    raise typer.Exit(2)
