"""The command line of `hvdtrain run`."""

from __future__ import annotations

import functools
import os
from typing import Annotated, Any

import typer

from hvdtrain.cli.shared import Command, Debug, completed, option
from hvdtrain.errors import UsageError
from hvdtrain.system.settings import RUN_NAME


class RunCommand(Command):
    """Reads its own options and passes every other one to the launcher, as it was written."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the command line, and read our own options."""
        from hvdtrain.launch import arguments, config_file

        read = functools.lru_cache(config_file.read)  # once: it may be a pipe
        try:
            parts = arguments.split(args, launcher_in=lambda file: read(file).launcher)
        except UsageError:
            if not ctx.resilient_parsing:
                raise
            parts = arguments.Split()  # for a shell's completion of an incomplete command line
        ctx.obj = parts, read
        return super().parse_args(ctx, parts.ours)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line."""
        return ["-np N", "[OPTIONS]", "[ANY OPTION OF horovodrun]", "[python] train.py [ARGS]..."]


def run(
    ctx: typer.Context,
    ranks: Annotated[str | None, option("Number of ranks.", "-np", "--num-proc", metavar="N")] = None,
    max_restarts: Annotated[
        str | None, option("Restart a failed job at most K times; 0 for never.  [default: 3]", metavar="K")
    ] = None,
    grace: Annotated[
        str | None,
        option(
            "Time for ranks to write a checkpoint after SIGTERM, SIGINT or SIGUSR1.  [default: 30]", metavar="SECONDS"
        ),
    ] = None,
    launcher: Annotated[
        str | None, option("What starts the ranks.  [default: horovodrun]", **completed("horovodrun", "mpirun"))
    ] = None,
    config: Annotated[
        str | None, option("Read options from this YAML file; the command line wins.", metavar="FILE")
    ] = None,
    debug: Debug = False,
) -> None:
    """Run a script on several ranks, and restart it when a process dies.

    The remaining processes of a failed job are ended before the restart. A script with a checkpoint resumes from it.
    `hvdtrain --help` lists the exit statuses.

    Keys of the file: np, hosts, max-restarts, grace, launcher, launcher-options, environment, script, arguments.
    The command line wins; further arguments of the script follow --.

    Example: hvdtrain run -np 4 train.py --epochs 90

    Example: hvdtrain run --config train.yaml -np 2 -- --epochs 1
    """
    from hvdtrain.launch import job_folder, supervisor
    from hvdtrain.launch.config_file import DEFAULTS, Settings
    from hvdtrain.launch.prepare import prepare

    parts, read = ctx.obj
    typed = Settings(ranks, max_restarts, grace, launcher, parts.passed, program=parts.program)
    settings = (typed if config is None else typed.over(read(config))).over(DEFAULTS)
    os.environ.update(settings.environment)  # as if it had been set before the command
    with job_folder.removed_at_the_end():
        launch, run_dir = prepare(settings)
        try:
            # The folder that `hvdtrain.callbacks.RunFolder` takes.
            path = settings.save(launch.environment.get("HVDTRAIN_RUNS", "runs"), launch.environment[RUN_NAME])
            where = f" (saved in {path})" if path else ""
        except OSError as problem:
            where = f" (not saved: {problem})"
        supervisor.say(f"{settings}{where}")
        raise typer.Exit(supervisor.run(launch, run_dir))
