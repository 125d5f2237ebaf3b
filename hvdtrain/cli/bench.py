"""The command line of `hvdtrain bench`: options only, so that `hvdtrain --help` imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hvdtrain.cli.shared import FILE, SECONDS, Debug, one_of, whole_number


def bench(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="The script's own arguments, after --.")
    ] = None,
    ranks: Annotated[int, typer.Option("-np", "--ranks", help="Number of ranks.", **whole_number())] = 2,
    hosts: Annotated[
        str | None, typer.Option("-H", "--hosts", metavar="LIST", help="host1:slots,host2:slots; default: here.")
    ] = None,
    script: Annotated[Path | None, typer.Option(help="Time the steps of this script of yours instead.", **FILE)] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Measured steps; default 30, with a script 100. 0: until the script ends.", **whole_number()),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            help="Default: torch, or keras on KERAS_BACKEND where there is no torch.", **one_of("torch", "keras")
        ),
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(help="The largest message; default 64 MiB.", **whole_number())
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Speed between hosts, such as 25Gb/s: the floor of a flat ring over it."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Up to 1 MiB, a small model and few steps.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds after which everything is ended.", **SECONDS)] = 300,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object; hvdtrain plan reads it.")] = False,
    debug: Debug = False,
) -> None:
    """Measure allreduce and the parts of a step, and say what to do.

    The ranks are started here; allreduce is measured by size, the step is a standard model's or your script's.

    Example: hvdtrain bench -np 2 --script train.py --steps 50 -- --epochs 1
    """
    from hvdtrain.tools.bench.run import BenchOptions, run

    run(
        BenchOptions(
            ranks=ranks,
            hosts=hosts,
            framework=framework,
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
