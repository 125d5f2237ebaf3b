"""The command line of `hvdtrain bench`: options only, so that `hvdtrain --help` imports nothing heavy."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Framework(str, Enum):
    """What `--framework` can name."""

    torch = "torch"
    keras = "keras"


def bench(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="The script's own arguments, after --.")
    ] = None,
    ranks: Annotated[int, typer.Option("-np", "--ranks", help="Number of ranks.")] = 2,
    hosts: Annotated[str | None, typer.Option("-H", "--hosts", help="host1:slots,host2:slots; default: here.")] = None,
    script: Annotated[Path | None, typer.Option(help="Time the steps of this script of yours instead.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Measured steps; default 30, with a script 100. 0: until the script ends."),
    ] = None,
    framework: Annotated[
        Framework | None, typer.Option(help="Default: torch, or keras on KERAS_BACKEND where there is no torch.")
    ] = None,
    max_bytes: Annotated[int | None, typer.Option(help="The largest message; default 64 MiB.")] = None,
    link: Annotated[
        str | None, typer.Option(help="Speed between hosts, such as 25Gb/s: the floor of a flat ring over it.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Up to 1 MiB, a small model and few steps.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds after which everything is ended.")] = 300,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object; hvdtrain plan reads it.")] = False,
) -> None:
    """Measure allreduce by size and the parts of a step, on ranks started here, and say what to do about them."""
    from hvdtrain.bench.run import Options, run

    run(
        Options(
            ranks=ranks,
            hosts=hosts,
            framework=framework.value if framework else None,
            max_bytes=max_bytes,
            link=link,
            quick=quick,
            steps=steps,
            timeout_s=timeout,
            script=script,
            arguments=arguments or (),
            as_json=json,
        )
    )
