"""Measure the cost of random stalls, with and without `Trainer(cutoff=0.75)`; as root, on Linux.

    python -m benchmarks.backup_workers

Four ranks train an MLP, with a part of a core each (`benchmarks.limited_ranks`) and eight batches a step. In 2 % of its
batches each rank, or the last one alone, sleeps for as long as five steps take without stalls. Jobs take turns: without
stalls, and with them, in synchronous steps and with the cutoff. Samples a second, over all ranks, are those of the
whole run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from typing import Any

from benchmarks import limited_ranks

MODULE = "benchmarks.backup_workers"
ACCUMULATE = 8
STALLED_STEPS = 5
JOBS: dict[str, dict[str, Any]] = {
    "no stalls": {"stalled": "none", "cutoff": None},
    "no stalls, cutoff=0.75": {"stalled": "none", "cutoff": 0.75},
    "the last rank stalls": {"stalled": "last", "cutoff": None},
    "the last rank stalls, cutoff=0.75": {"stalled": "last", "cutoff": 0.75},
    "every rank stalls": {"stalled": "every", "cutoff": None},
    "every rank stalls, cutoff=0.75": {"stalled": "every", "cutoff": 0.75},
}


def train(options: argparse.Namespace) -> None:
    """Train on this rank, and write down the speed."""
    import hvdtrain

    world = hvdtrain.init("torch", seed=0)
    job = JOBS[options.job]
    limited_ranks.limit(world.rank, options.cores)
    trainer, data = limited_ranks.make_trainer(200_000, 256, accumulate=ACCUMULATE, cutoff=job["cutoff"])
    drawn = random.Random(world.rank)

    def stall(*_: object) -> None:
        if drawn.random() < options.share:
            time.sleep(options.stall_s)

    if job["stalled"] == "every" or (job["stalled"] == "last" and world.rank == world.size - 1):
        trainer.model.register_forward_pre_hook(stall)
    history = trainer.fit(
        data, epochs=100, seconds=options.seconds, batch_size=options.batch_size, progress=False, run_dir=None
    )
    if world.is_root:
        speed = round(statistics.fmean(history["samples_per_s"]))
        step_s = round(sum(history["seconds"]) / trainer.global_step, 4)
        result = {"samples_per_s": speed, "step_s": step_s, "steps": trainer.global_step, "cut": len(history.cutoffs)}
        options.result.write_text(json.dumps(result))


def main() -> None:
    """Measure and print, or, started by a launcher, train."""
    parser = limited_ranks.parser(MODULE, __doc__, JOBS, batch_size=256)
    parser.add_argument("--share", type=float, default=0.02, help="of the batches that stall")
    parser.add_argument("--stall-s", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        train(options)
        return
    found: dict[str, list[float]] = defaultdict(list)
    extra: list[str] = []
    for name, result in limited_ranks.take_turns(MODULE, JOBS, rounds=options.rounds, extra=extra):
        found[name].append(result["samples_per_s"])
        if not options.stall_s and not extra:  # the first job has no stalls
            stall_s = STALLED_STEPS * result["step_s"]
            print(f"a stall takes {stall_s:.2f} s, {STALLED_STEPS} steps", flush=True)
            extra += ["--stall-s", str(stall_s)]
    limited_ranks.print_medians(found, unit="samples/s")


if __name__ == "__main__":
    main()
