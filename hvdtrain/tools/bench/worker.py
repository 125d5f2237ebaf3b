"""One rank of `hvdtrain bench`: measures memory, allreduce by size, and the steps of a standard model."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass

import numpy as np

from hvdtrain.distributed import frameworks
from hvdtrain.distributed.world import World, init
from hvdtrain.telemetry.step_times import WARMUP_STEPS, RankReport, Spread, StepTimes, rank_report
from hvdtrain.tools.bench import sweep

MARK = "HVDTRAIN_BENCH:"


@dataclass(frozen=True)
class WorkerPlan:
    """The measurement to make."""

    framework: str  # "torch" or "keras"
    max_bytes: int = 64 << 20  # the sweep's largest message
    budget_s: float = 1.0  # about how long each size is measured
    steps: int = 30  # of the standard model
    hidden: int = 4096  # width of its two hidden layers
    batch_size: int = 64  # samples per rank and step


INPUTS, CLASSES = 784, 10


def main(text: str) -> int:
    """Measure, and print the results on rank 0."""
    plan = WorkerPlan(**json.loads(text))
    world = init(plan.framework)
    points = [dataclasses.asdict(point) for point in measure_sweep(plan, world)] if world.size > 1 else []
    ranks = world.allgather_object(measure_steps(plan, world).to_json(), name="steps")
    if world.is_root:
        sys.stdout.flush()
        text = json.dumps({"points": points, "ranks": ranks})
        os.write(1, f"\n{MARK}{text}\n".encode())
    return 0


def measure_sweep(plan: WorkerPlan, world: World) -> list[sweep.Point]:
    """Return a point a size."""
    subject = frameworks.load(plan.framework, "bench")
    points = []
    for num_bytes in sweep.sizes(plan.max_bytes):
        reduce = subject.allreduce_of(num_bytes, device=world.device)
        times = sweep.measure(
            reduce, budget_s=plan.budget_s, agree=lambda once_s: float(world.allreduce(np.array([once_s]), "max")[0])
        )
        gathered = world.allgather(np.array([times]), name="times")  # (ranks, repeats)
        mine = sweep.copy_bandwidth(world.barrier, num_bytes=num_bytes)
        mean = world.allreduce(np.array(dataclasses.astuple(mine)), "mean", name="memory")
        points.append(sweep.Point(num_bytes, sweep.slowest(gathered.tolist()), len(times), Spread(*mean.tolist())))
    return points


def measure_steps(plan: WorkerPlan, world: World) -> RankReport:
    """Train the standard model for one epoch of `plan.steps` measured steps, and return the recorded times."""
    from hvdtrain import Trainer

    times = StepTimes()
    detach = frameworks.load(plan.framework, "step_marks").attach(times)
    random = np.random.default_rng(0)
    count = (WARMUP_STEPS + plan.steps) * plan.batch_size * world.size
    # Rows that overlap in memory, or every rank would hold the samples of all.
    inputs = np.lib.stride_tricks.sliding_window_view(random.random(count + INPUTS - 1, np.float32), INPUTS)
    targets = random.integers(0, CLASSES, count)
    subject = frameworks.load(plan.framework, "bench")
    trainer = Trainer(**subject.mlp(INPUTS, plan.hidden, CLASSES))
    trainer.fit((inputs, targets), batch_size=plan.batch_size, progress=False)
    detach()
    return rank_report(times)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
