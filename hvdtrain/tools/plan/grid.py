"""The forecast of a model that a Grid divides, beside plain data parallelism with as many samples in a step.

R ranks are replicas of S stages x N shards. A replica's batch is S times that of a rank without a Grid, so each rank
computes for T_comp as before. With T_comp, exposed and waiting as in `model`, M micro-batches, and c the time of a
message between stages, a step lasts

    (M + S - 1) (T_comp / M + 2 c) + shards + exposed + waiting

- Stages wait for each other for (S - 1) / (M + S - 1) of their time, the bubble. torch's schedules also wait for each
  message, forward's and backward's.
- shards: fully_shard gathers weights for forward and for backward, and reduce-scatters gradients: on a ring (N - 1) / N
  of the stage's bytes each time. It does so once in a step, in stages at most once in a micro-batch. Computing waits.
- exposed: replicas allreduce 1 / (S N) of the gradients: those of stages beside the last micro-batch's backward, those
  of shards after it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from hvdtrain.system.quantities import format_size, format_time
from hvdtrain.telemetry.memory import WORDS, Parts
from hvdtrain.tools.plan.memory import BUFFER_BYTES, MemoryPlan
from hvdtrain.tools.plan.model import Algorithm, Cluster, Step, allreduce, forecast, require


@dataclass(frozen=True, kw_only=True)
class Column:
    """A rank's step: seconds by what takes them, bytes that it sends at most by receiver, and what it holds at most."""

    times: dict[str, float]
    sent: dict[str, float]
    memory: Parts

    @property
    def step_s(self) -> float:
        """Seconds from one step to the next."""
        return sum(self.times.values())


@dataclass(frozen=True, kw_only=True)
class GridPlan:
    """A model on a Grid; `divided` is a step with it, `plain` one without.

    Attributes:
        step, cluster, memory: of a rank with the whole model.
        schedule: "1f1b" or "gpipe".
        boundary_bytes: what a sample passes from a stage to the next.

    Raises:
        ValueError: the ranks cannot be divided into replicas, or micro-batches are out of their range; with numbers
            that work.
    """

    step: Step
    cluster: Cluster
    memory: MemoryPlan
    stages: int = 1
    shards: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    boundary_bytes: float = 0.0

    def __post_init__(self) -> None:
        require("what a sample passes between stages (bytes)", self.boundary_bytes, "0 or above, and finite")
        each, ranks, per_host = self.replica, self.memory.ranks, self.cluster.ranks_per_host
        if ranks % each:
            fewer = ranks // each * each
            counts = f"{fewer} or {fewer + each}" if fewer else f"{each}"
            raise ValueError(f"a replica of {self} takes {each} ranks: give --ranks {counts}. Received: {ranks}")
        if ranks > per_host and per_host % each and each % per_host:
            raise ValueError(
                f"a replica of {self} takes {each} ranks, so hosts of {per_host} would divide some between them: give "
                f"--ranks-per-host {each}, or a multiple or divisor of it"
            )
        least, most = self.stages if self.schedule == "1f1b" else 1, self.samples
        if self.stages > 1 and not least <= self.micro_batches <= most:
            raise ValueError(
                f"--micro-batches must be from {least}, for --schedule {self.schedule}, to {most}, the samples of a "
                f"replica ({self.stages} x {self.step.samples}). Received: {self.micro_batches}"
            )

    def __str__(self) -> str:
        lengths = {"stages": self.stages, "shard": self.shards}
        return f"Grid({', '.join(f'{name}={length}' for name, length in lengths.items() if length > 1)})"

    @property
    def replica(self) -> int:
        """The ranks of a replica."""
        return self.stages * self.shards

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self.memory.ranks // self.replica

    @property
    def samples(self) -> int:
        """The samples that go through a pipeline in a step."""
        return self.stages * self.step.samples

    @property
    def bubble(self) -> float:
        """The share of the stages' time for which they wait for each other."""
        return (self.stages - 1) / (self.micro_batches + self.stages - 1)

    def plain(self) -> Column:
        """Return a step of data parallelism."""
        found = forecast(self.step, self.cluster, self.memory.ranks)
        times = {"T_comp": found.compute_s, "exposed allreduce": found.exposed_s, "waiting": found.waiting_s}
        sent = {"replicas": 2 * (1 - 1 / found.ranks) * self.step.gradient_bytes}
        return Column(times=times, sent=sent, memory=self.memory.parts)

    def divided(self) -> Column:
        """Return a step with the Grid."""
        stages, parts = self.stages, self.memory.parts
        rounds, passes = self.micro_batches + stages - 1, self.micro_batches if stages > 1 else 1
        weights, gradients = parts.weights / stages, self.step.gradient_bytes / stages
        last = replace(
            self.step, compute_s=self.step.compute_s / self.micro_batches, gradient_bytes=gradients / self.shards
        )
        found = forecast(last, _every(self.cluster, self.replica), self.replicas)
        plain = self.plain().times
        times = {
            "T_comp": plain["T_comp"],
            "bubble": last.compute_s * (stages - 1),
            "messages of stages": rounds * 2 * self._message_s() if stages > 1 else 0.0,
            "exchanges of shards": passes * (2 * self._half_ring_s(weights) + self._half_ring_s(gradients)),
            "exposed allreduce": found.sync_s if self.shards > 1 else found.exposed_s,
            "waiting": plain["waiting"],
        }
        sent = {
            "stages": min(stages - 1, 2) * self.samples * self.boundary_bytes,  # an inner stage has two neighbours
            "shards": passes * (1 - 1 / self.shards) * (2 * weights + gradients),
            "replicas": 2 * (1 - 1 / self.replicas) * last.gradient_bytes,
        }
        held = stages if self.schedule == "1f1b" else self.micro_batches  # micro-batches, by the first stage
        memory = Parts(
            weights=weights / self.shards,
            gradients=parts.gradients / self.replica,
            optimizer=parts.optimizer / self.replica,
            buckets=min(BUFFER_BYTES, last.gradient_bytes) if self.replicas > 1 else 0.0,
            # A batch is S times as large, and a stage has 1 / S of the layers.
            activations=parts.activations and parts.activations * held / self.micro_batches,
        )
        return Column(times=times, sent=sent, memory=memory)

    def verdict(self) -> tuple[bool, str]:
        """Return whether the Grid pays, and why."""
        plain, grid, limit = self.plain(), self.divided(), self.memory.limit
        whole, part = format_size(plain.memory.total), format_size(grid.memory.total)
        fits, most = self.memory.first_that_fits(), "" if limit is None else format_size(limit)
        most += " before any activations" * (plain.memory.activations is None)
        steps = f"a step takes {format_time(grid.step_s)}, without the Grid {format_time(plain.step_s)}"
        if limit is None:
            memory = f"A rank holds {part} instead of {whole}: --limit says whether it has to"
        elif grid.memory.total > limit:
            return False, f"{self} does not fit: a rank needs {part} of {most}. Give more stages or shards."
        elif fits is None:
            needs = (
                f"a rank needs {part} of {most}, and for the whole model {whole}, with the Trainer's options at least"
            )
            return True, f"{self} pays: {needs} {format_size(self.memory.least())}. If that fitted, {steps}."
        elif fits.options:
            memory = f"The whole model needs {whole} of {most}. It fits with Trainer({fits.name}), not counted here"
        else:
            memory = f"The whole model fits: {whole} of {most}"
        pays = grid.step_s < plain.step_s
        return pays, f"{self} {'pays' if pays else 'does not pay'}: {steps}. {memory}."

    def _message_s(self) -> float:
        """Return the seconds in which the slowest stage passes a micro-batch to the next."""
        crosses = self.replica > self.cluster.ranks_per_host
        pair = replace(_every(self.cluster, self.shards), algorithm=Algorithm.ring, ranks_per_host=1 if crosses else 2)
        # In an allreduce, each of a pair sends as many bytes, in two hops.
        sent_s, fixed_s = allreduce(pair, self.samples / self.micro_batches * self.boundary_bytes, 2)
        return sent_s + (fixed_s + pair.overhead_s) / 2

    def _half_ring_s(self, size_bytes: float) -> float:
        """Return the seconds of an all-gather or reduce-scatter among shards: half an allreduce, by buckets."""
        ring, count = replace(self.cluster, algorithm=Algorithm.ring), math.ceil(size_bytes / self.cluster.bucket_bytes)
        sent_s, fixed_s = allreduce(ring, size_bytes / count, self.shards)
        return count * (sent_s + fixed_s + ring.overhead_s) / 2 if self.shards > 1 else 0.0


def _every(cluster: Cluster, distance: int) -> Cluster:
    """Return what a group of every `distance`-th rank has of the cluster: as many such groups share a host's link.

    Within a host all ranks send at once also in a ring of all, so there each group has the full speed.
    """
    link, local = cluster.link_bytes_per_s, cluster.ranks_per_host
    share = None if link is None else link / min(distance, local)
    return replace(cluster, ranks_per_host=max(1, local // distance), link_bytes_per_s=share)


def as_json(plan: GridPlan) -> dict[str, Any]:
    """Return the plan as one JSON object, in seconds and bytes."""
    names = ("stages", "shards", "micro_batches", "schedule", "boundary_bytes", "replicas", "bubble")
    columns = {"data_parallel": plan.plain(), "grid": plan.divided()}
    pays, why = plan.verdict()
    return {
        "ranks": plan.memory.ranks,
        "limit": plan.memory.limit,
        **{name: getattr(plan, name) for name in names},
        **{name: asdict(each) | {"step_s": each.step_s} for name, each in columns.items()},
        "pays": pays,
        "why": why,
    }


def show(plan: GridPlan, console: Console) -> None:
    """Print a column without the Grid and one with it, and whether it pays."""
    columns = (plan.plain(), plan.divided())
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"on {plan.memory.ranks} ranks", no_wrap=True)
    for heading in ("data parallelism", str(plan)):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("step", *(format_time(each.step_s) for each in columns))
    for name in columns[1].times:
        if any(seconds := [each.times.get(name, 0.0) for each in columns]):
            table.add_row(f"  {name}", *map(format_time, seconds))
    for name in columns[1].sent:
        if any(sizes := [each.sent.get(name, 0.0) for each in columns]):
            table.add_row(f"sent to {name}", *map(format_size, sizes))
    table.add_row("memory", *(format_size(each.memory.total) for each in columns))
    for name in columns[0].memory.largest_first():
        table.add_row(f"  {WORDS[name]}", *(format_size(getattr(each.memory, name)) for each in columns))
    console.print(table)
    console.print(f"\n{_meaning(plan)}\n{plan.verdict()[1]}")


def _meaning(plan: GridPlan) -> str:
    said = f"{plan.replicas} replica{'s' * (plan.replicas > 1)} of {plan.replica} ranks. "
    if plan.stages > 1:
        said += (
            f"A pipeline's batch is {plan.samples} samples in {plan.micro_batches} micro-batches, {plan.schedule}; "
            f"stages, counted as equal, wait for each other {plan.bubble:.0%} of their time. "
        )
    if plan.shards > 1:
        said += "Not counted: a layer's weights, whole while it computes. "
    if plan.memory.parts.activations is None:
        said += "Activations are not known: give --activations. "
    return said + "Memory is at most, without the framework itself and data."
