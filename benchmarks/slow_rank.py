"""Measure the cost of one slow rank, with and without `fit(balance="speed")`; as root, on Linux.

    python -m benchmarks.slow_rank

Four ranks train an MLP, with a part of a core each (`benchmarks.limited_ranks`); the last rank's may be halved. Three
jobs take turns: four equal ranks; the last one at half speed; and the same with balance="speed". With equal parts the
second takes twice the first's time; the best division takes 8/7 of it. Of each job, the last third counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import defaultdict
from typing import Any

from benchmarks import limited_ranks
from hvdtrain.callbacks import Callback

MODULE = "benchmarks.slow_rank"
JOBS = {
    "equal ranks": {"slow": False, "balance": None},
    "the last at half speed": {"slow": True, "balance": None},
    'the last at half speed, balance="speed"': {"slow": True, "balance": "speed"},
}


class Times(Callback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, trainer: Any, step: int) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())


def train(options: argparse.Namespace) -> None:
    """Train on this rank, and write down the step time."""
    import hvdtrain

    world = hvdtrain.init("torch", seed=0)
    job = JOBS[options.job]
    limited_ranks.limit(world.rank, options.cores * (0.5 if job["slow"] and world.rank == world.size - 1 else 1.0))
    trainer, data = limited_ranks.make_trainer(20_000, 512)
    times = Times()
    trainer.fit(
        data, seconds=options.seconds, batch_size=options.batch_size, balance=job["balance"], callbacks=[times],
        progress=False, run_dir=None,
    )  # fmt: skip
    if world.is_root:
        ends = times.ends[-len(times.ends) // 3 :]
        taken = [b - a for a, b in itertools.pairwise(ends)]
        shares = trainer.shares
        result = {"step_ms": round(1000 * statistics.fmean(taken), 1), "steps": len(times.ends), "shares": shares}
        options.result.write_text(json.dumps(result))


def main() -> None:
    """Measure and print, or, started by a launcher, train."""
    options = limited_ranks.parser(MODULE, __doc__, JOBS, batch_size=2048).parse_args()
    if options.job:
        train(options)
        return
    found: dict[str, list[float]] = defaultdict(list)
    for name, result in limited_ranks.take_turns(MODULE, JOBS, rounds=options.rounds):
        found[name].append(result["step_ms"])
    limited_ranks.print_medians(found, unit="ms a step")


if __name__ == "__main__":
    main()
