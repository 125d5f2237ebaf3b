"""Let the Trainer, which has its own loop, take steps in turns."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

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
