"""The command line of `hvdtrain bench`: options only, so that `hvdtrain --help` imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hvdtrain.cli.shared import COUNT, FILE, SECONDS, Debug, one_of, option

_FRAMEWORK = one_of("torch", "keras")


def bench(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="The script's own arguments, after --.")
    ] = None,
    ranks: Annotated[int, option("Number of ranks.", "-np", "--ranks", **COUNT)] = 2,
    hosts: Annotated[
        str | None, option("host1:slots,host2:slots; default: here.", "-H", "--hosts", metavar="LIST")
    ] = None,
    script: Annotated[Path | None, option("Time the steps of this script of yours instead.", **FILE)] = None,
    steps: Annotated[
        int | None, option("Measured steps; default 30, with a script 100. 0: until the script ends.", **COUNT)
    ] = None,
    framework: Annotated[
        str | None, option("Default: torch, or keras on KERAS_BACKEND where there is no torch.", **_FRAMEWORK)
    ] = None,
    max_bytes: Annotated[int | None, option("The largest message; default 64 MiB.", **COUNT)] = None,
    link: Annotated[
        str | None, option("Speed between hosts, such as 25Gb/s: the floor of a flat ring over it.", metavar="RATE")
    ] = None,
    quick: Annotated[bool, option("Up to 1 MiB, a small model and few steps.", "--quick")] = False,
    timeout: Annotated[float, option("Seconds after which everything is ended.", **SECONDS)] = 300,
    json: Annotated[bool, option("Print one JSON object; hvdtrain plan reads it.", "--json")] = False,
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
