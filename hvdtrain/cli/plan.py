"""The command line of `hvdtrain plan`."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hvdtrain.cli.shared import COUNT, FILE, NUMBER, Debug, one_of, option, quantity, whole_number
from hvdtrain.errors import UsageError
from hvdtrain.system.quantities import format_time, parse_rate, parse_size, parse_time
from hvdtrain.telemetry.memory import Parts
from hvdtrain.tools.plan.model import Algorithm, Cluster, Step, forecast, read_measured

if TYPE_CHECKING:
    from hvdtrain.tools.plan.memory import MemoryPlan

Amount = float | None
_TIME, _SIZE, _RATE = quantity(parse_time, "TIME"), quantity(parse_size, "SIZE"), quantity(parse_rate, "RATE")
_ALGORITHM = one_of(*(each.value for each in Algorithm))
_MEMORY = "With --memory, --stages or --shards"
_COUNTS = {"k": 1e3, "M": 1e6, "B": 1e9}


def _parameters(text: str) -> float:
    scale = _COUNTS.get(text[-1:])
    try:
        return float(text[:-1]) * scale if scale else float(text)
    except ValueError:
        raise ValueError(f"must be a number, such as 350M, 1.3B or 2.5e6. Received: {text}") from None


def plan(
    step: Annotated[Amount, option("T_comp: a rank's step without communication, e.g. 200ms.", **_TIME)] = None,
    gradients: Annotated[
        Amount, option("What a rank reduces in a step, e.g. 80MB: 4 bytes a weight in fp32.", **_SIZE)
    ] = None,
    batch_size: Annotated[int | None, option("Samples that one rank takes in a step.", **COUNT)] = None,
    backward_share: Annotated[
        Amount, option(f"Backward's share of the step, up to 1.  [default: {Step.backward_share:.2f}]", **NUMBER)
    ] = None,
    spread: Annotated[Amount, option("Standard deviation of the step's time.  [default: 0s]", **_TIME)] = None,
    measured: Annotated[
        Path | None, option("Take what is not given from a file of: hvdtrain bench --script X --json", **FILE)
    ] = None,
    link: Annotated[Amount, option("Link between hosts, each direction, e.g. 25Gb/s or 3.1GB/s.", **_RATE)] = None,
    link_efficiency: Annotated[
        Amount, option(f"What headers leave of it; 1 if measured.  [default: {Cluster.link_efficiency}]", **NUMBER)
    ] = None,
    ranks_per_host: Annotated[int, option("Ranks that share a host and its link.", **COUNT)] = 1,
    intra: Annotated[Amount, option("What an allreduce reaches within a host, e.g. 10GB/s.", **_RATE)] = None,
    latency: Annotated[
        Amount, option(f"A hop between hosts.  [default: {format_time(Cluster.latency_s)}]", **_TIME)
    ] = None,
    intra_latency: Annotated[
        Amount, option(f"A hop within a host.  [default: {format_time(Cluster.intra_latency_s)}]", **_TIME)
    ] = None,
    overhead: Annotated[
        Amount, option(f"Starting an allreduce.  [default: {format_time(Cluster.overhead_s)}]", **_TIME)
    ] = None,
    bucket: Annotated[
        Amount, option(f"Gradients reduced together.  [default: {Cluster.bucket_bytes / 2**20:g}MiB]", **_SIZE)
    ] = None,
    overlap: Annotated[
        float, option("1: allreduce runs beside backward; 0: it takes the cores that compute.", **NUMBER)
    ] = Cluster.overlap,
    algorithm: Annotated[str, option("How an allreduce travels.", **_ALGORITHM)] = Cluster.algorithm.value,
    max_ranks: Annotated[int, option("Forecast for 1, 2, 4, ... up to this.", **COUNT)] = 4096,
    samples: Annotated[int, option("Samples of the run whose time and cost are shown.", **COUNT)] = 1_000_000,
    price: Annotated[Amount, option("Of one rank for one hour.  [default: show rank-hours]", **NUMBER)] = None,
    worth: Annotated[float, option("What an added rank must bring, of a lone rank's work.", **NUMBER)] = 0.5,
    moments: Annotated[
        int, option("What the optimizer keeps for each weight: 0 plain SGD, 1 momentum, 2 Adam.", **whole_number(0))
    ] = 2,
    memory: Annotated[bool, option("Forecast a rank's memory instead of its speed.", "--memory")] = False,
    stages: Annotated[int, option("Stages that a model is divided into.", **whole_number(1))] = 1,
    shards: Annotated[int, option("Ranks that share out each weight (fully_shard).", **whole_number(1))] = 1,
    micro_batches: Annotated[
        int | None, option("With --stages: parts of a batch.  [default: 4 for each stage]", **whole_number(1))
    ] = None,
    schedule: Annotated[
        str | None, option("With --stages: torch's.  [default: 1f1b]", **one_of("1f1b", "gpipe"))
    ] = None,
    boundary: Annotated[
        Amount, option("With --stages: what one sample passes from a stage to the next, e.g. 4MB.", **_SIZE)
    ] = None,
    parameters: Annotated[
        Amount, option(f"{_MEMORY}: of the model, e.g. 1.3B.", **quantity(_parameters, "COUNT"))
    ] = None,
    bytes_each: Annotated[int, option(f"{_MEMORY}: bytes of a parameter, 4 in fp32.", **whole_number(1))] = 4,
    activations: Annotated[
        Amount, option(f"{_MEMORY}: what a step of --batch-size samples takes besides, e.g. 8GB.", **_SIZE)
    ] = None,
    ranks: Annotated[int | None, option(f"{_MEMORY}: number of ranks.", **whole_number(1))] = None,
    limit: Annotated[Amount, option(f"{_MEMORY}: what a rank may take, e.g. 24GB.", **_SIZE)] = None,
    json: Annotated[bool, option("Print one JSON object.", "--json")] = False,
    debug: Debug = False,
) -> None:
    """Forecast speed and cost on 1 to 4096 ranks from one measured step.

    T_comp is a rank's step without communication; it stays, since the batch of a rank stays. T_sync is the time to
    allreduce its gradients: bytes sent / bandwidth + hops * latency + what starting each allreduce takes. Overlap:
    T_sync runs beside backward, bucket by bucket, as gradients become ready; what is left when backward ends is
    exposed, the last bucket always. A step lasts T_comp + exposed + waiting for the slowest rank (from --spread).
    Efficiency is T_comp / step.

    Adding ranks stops paying where no larger number of ranks brings --worth of a lone rank's work for each rank added.

    Last come the strategies of synchronization on the largest number of ranks: what a rank sends, and which one is the
    first to reach 90 % of a lone rank's speed.

    With --memory: what a rank holds of weights, gradients, optimizer state (--moments for each parameter), buckets and
    activations, with each option that shrinks a part and with all, and the first combination that fits --limit.
    --measured takes what is not given from what bench has measured.

    With --stages or --shards: a step on --ranks ranks and a rank's memory, as hvdtrain.torch.Grid divides the model,
    beside plain data parallelism with as many samples in a step; and whether the Grid pays.

    Quantities need a unit: 200ms, 80MB, 64MiB, 25Gb/s (bits), 3.9GB/s (bytes).

    Example: hvdtrain plan --step 200ms --gradients 80MB --batch-size 64 --link 25Gb/s

    Example: hvdtrain plan --memory --parameters 1.3B --ranks 8 --activations 8GB --batch-size 32 --limit 24GB
    """

    def known(**given: Any) -> dict[str, Any]:
        """Return what was given, else what the file says; the dataclasses know the rest."""
        values = {name: from_file.get(name) if value is None else value for name, value in given.items()}
        return {name: value for name, value in values.items() if value is not None}

    try:
        from_file: Mapping[str, float] = {} if measured is None else read_measured(measured)
        is_divided = stages * shards > 1
        of_memory = {"--parameters": parameters, "--activations": activations, "--ranks": ranks, "--limit": limit}
        if not memory and not is_divided:
            _refuse(of_memory, "--memory, --stages or --shards")
        if stages == 1:
            _refuse({"--micro-batches": micro_batches, "--schedule": schedule, "--boundary": boundary}, "--stages")
        weights = None if parameters is None else parameters * bytes_each
        given = known(weights=weights, activations=activations, ranks=ranks, samples=batch_size)
        of_model = from_file if weights is None else {}
        if memory:
            if is_divided:
                raise ValueError("--memory is of whole models: leave it out. --stages and --shards show memory too")
            from hvdtrain.tools.plan import memory as of_whole

            _print(_memory_plan(of_model, given, moments=moments, limit=limit), of_whole, json=json)
            return
        if is_divided and gradients is None:
            gradients = weights
        of_step = known(
            compute_s=step, gradient_bytes=gradients, samples=batch_size, backward_share=backward_share, spread_s=spread
        )
        options = {"compute_s": "--step", "gradient_bytes": "--gradients", "samples": "--batch-size"}
        if missing := [option for name, option in options.items() if name not in of_step]:
            raise ValueError(
                f"{', '.join(missing)} missing: give {'them' if missing[1:] else 'it'}, or a --measured file"
            )
        the_step = Step(**of_step)
        the_cluster = Cluster(
            **known(link_bytes_per_s=link, link_efficiency=link_efficiency, ranks_per_host=ranks_per_host),
            **known(intra_bytes_per_s=intra, latency_s=latency, intra_latency_s=intra_latency, overhead_s=overhead),
            **known(bucket_bytes=bucket, overlap=overlap, algorithm=Algorithm(algorithm)),
        )
        largest = int(given.get("ranks", 1)) if is_divided else max_ranks
        if the_cluster.link_bytes_per_s is None and largest > ranks_per_host:
            name = "--ranks" if is_divided else "--max-ranks"
            raise ValueError(f"--link missing: give the speed between hosts, or a {name} that --ranks-per-host covers")
        if the_cluster.intra_bytes_per_s is None and ranks_per_host > 1:
            raise ValueError("--intra missing: several ranks share a host, so give the speed between them")
        if is_divided:
            from hvdtrain.tools.plan import grid

            if stages > 1 and boundary is None:
                raise ValueError("--boundary missing: give what one sample passes from a stage to the next")
            reduced = the_step.gradient_bytes
            of_model, given = {**of_model, "gradient_bytes": reduced}, {"weights": reduced, **given}
            divided = grid.GridPlan(
                step=the_step,
                cluster=the_cluster,
                memory=_memory_plan(of_model, given, moments=moments, limit=limit),
                stages=stages,
                shards=shards,
                micro_batches=micro_batches or (min(4, the_step.samples) * stages if stages > 1 else 1),
                **known(schedule=schedule, boundary_bytes=boundary),
            )
            _print(divided, grid, json=json)
            return
        from hvdtrain.tools.plan import report

        result = report.Plan(
            step=the_step,
            cluster=the_cluster,
            forecasts=[forecast(the_step, the_cluster, ranks) for ranks in rank_counts(max_ranks)],
            run_samples=samples,
            price=price,
            worth=worth,
            moments=moments,
        )
        _print(result, report, json=json)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _refuse(options: Mapping[str, Any], whose: str) -> None:
    """Raise ValueError for an option that was given without the one whose it is."""
    if given := [name for name, value in options.items() if value is not None]:
        raise ValueError(f"{', '.join(given)} {'are' if given[1:] else 'is'} for {whose}, which is missing")


def _print(plan: Any, its: Any, *, json: bool) -> None:
    """Print a plan by the functions of its module: as one JSON object, or in a table and words."""
    if json:
        print(json_format.dumps(its.as_json(plan), indent=2))
        return
    from rich.console import Console

    its.show(plan, Console(highlight=False, width=None if sys.stdout.isatty() else 100))


def _memory_plan(
    measured: Mapping[str, float], given: Mapping[str, float], *, moments: int, limit: Amount
) -> MemoryPlan:
    """Return what a rank holds of a whole model; ValueError for what is missing or outside its range."""
    from hvdtrain.tools.plan.memory import BUFFER_BYTES, MemoryPlan

    options = {"weights": "--parameters", "ranks": "--ranks"}
    if missing := [option for name, option in options.items() if name not in given]:
        raise ValueError(f"{', '.join(missing)} missing: give {'them' if missing[1:] else 'it'}, or a --measured file")
    weights, ranks = given["weights"], int(given["ranks"])
    gradients = measured.get("gradient_bytes", weights)
    parts = Parts(
        weights=weights,
        gradients=gradients,
        optimizer=measured.get("optimizer", moments * weights),
        buckets=measured.get("buckets", min(BUFFER_BYTES, gradients) if ranks > 1 else 0.0),
        activations=given.get("activations"),
    )
    batch_size = int(given["samples"]) if "samples" in given else None
    return MemoryPlan(parts=parts, ranks=ranks, limit=limit, batch_size=batch_size)


def rank_counts(largest: int) -> list[int]:
    """Return 1, 2, 4, ... up to `largest`, and `largest` itself; ValueError above 2^20, where no forecast was tried."""
    if not 1 <= largest <= 2**20:
        raise ValueError(f"the largest number of ranks must be from 1 to {2**20}. Received: {largest}")
    counts = [2**power for power in range(largest.bit_length())]
    return counts if counts[-1] == largest else [*counts, largest]
