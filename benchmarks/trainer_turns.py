"""Let the Trainer, which has its own loop, take steps in turns."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import hvdtrain
from benchmarks.turns import Finished, Turns
from hvdtrain.callbacks import Callback


class Ticks(Callback):
    """Begins with the fit, and ticks after each step."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_fit_begin(self, trainer: Any) -> None:
        self._turns.begin()

    def on_step_end(self, trainer: Any, step: int) -> None:
        self._turns.tick()


def exchange() -> dict[str, Any]:
    """Return the Trainer's options for BENCH_COMPRESSION, and for BENCH_SYNC, such as LocalSGD:8 with its `every`."""
    name, _, every = os.environ.get("BENCH_SYNC", "").partition(":")
    sync = getattr(hvdtrain, name)(**({"every": int(every)} if every else {})) if name else None
    return {"sync": sync, "compression": os.environ.get("BENCH_COMPRESSION", "none")}


def fit(trainer: Any, task: Any, *, batch_size: int) -> None:
    """Fit on the task's arrays, all of which every rank has, until there are no more turns."""
    with suppress(Finished):
        trainer.fit(
            (task.inputs, task.targets),
            epochs=1_000_000,
            batch_size=batch_size,
            callbacks=[Ticks(task.turns(rank=trainer.world.rank))],
            progress=False,
        )
