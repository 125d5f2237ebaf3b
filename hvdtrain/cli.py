"""The command line: `hvdtrain build`, `doctor`, `run`, `bench`, `plan` and `report`."""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from hvdtrain.bench.command import bench
from hvdtrain.errors import HvdTrainError
from hvdtrain.plan.command import plan
from hvdtrain.report.command import report
from hvdtrain.runner.command import RunCommand, run

app = typer.Typer(
    help="Distributed training with Horovod for PyTorch and Keras 3.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Part(str, Enum):
    """What `hvdtrain build --without` can leave out."""

    torch = "torch"
    tensorflow = "tensorflow"
    mpi = "mpi"
    nccl = "nccl"


@app.command()
def build(
    without: Annotated[list[Part] | None, typer.Option(help="Leave this out; may be repeated.")] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Compile even where the cache has the wheel.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be built, and stop.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Take framework versions that no test has seen.")] = False,
    wheel_dir: Annotated[Path | None, typer.Option(help="Put a copy of the wheel there.")] = None,
    sdist: Annotated[
        Path | None, typer.Option(help="Horovod's sdist as a file, for machines without a network.")
    ] = None,
    cuda_arch: Annotated[
        str | None, typer.Option(help='GPU architectures, e.g. "80,90"; default: the GPUs that are here.')
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compiler processes at once; default: one a core.")] = None,
    install: Annotated[bool, typer.Option(help="Install the wheel into this environment and prove it.")] = True,
) -> None:
    """Build Horovod for the frameworks installed here, install it, and prove it by a two-process allreduce."""
    from hvdtrain.horovod_build.build import Options
    from hvdtrain.horovod_build.build import build as run_build

    left_out = {part.value for part in without or ()}
    # For set-ups that run this command for the user, who then has no command line to write --without on.
    if os.environ.get("HVDTRAIN_MPI") == "0":
        left_out.add("mpi")
    run_build(
        Options(
            without=frozenset(left_out),
            rebuild=rebuild,
            dry_run=dry_run,
            force=force,
            wheel_dir=wheel_dir,
            sdist=sdist,
            cuda_arch=cuda_arch,
            jobs=jobs,
            install=install,
        )
    )


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Say what is installed and whether training would work; exits non-zero when it would not."""
    from hvdtrain.doctor import run

    raise typer.Exit(run(as_json=json))


app.command()(bench)
app.command()(plan)
app.command()(report)
app.command(cls=RunCommand)(run)


def main() -> None:
    """Entry point: an error that we know is one message and exit status 1, not a traceback."""
    try:
        app()
    except HvdTrainError as error:
        sys.exit(f"hvdtrain: {error}")
    except OSError as error:
        # The system's own words, e.g. "[Errno 28] No space left on device: '/tmp/x'".
        sys.exit(f"hvdtrain: {error}")


if __name__ == "__main__":
    main()
