"""The Trainer's callback that tells the turns of its steps."""

from __future__ import annotations

from typing import Any

from benchmarks.turns import Turns
from hvdtrain.callbacks import Callback


class Ticks(Callback):
    """Begins with the fit, and ticks after each step."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_fit_begin(self, trainer: Any) -> None:
        self._turns.begin()

    def on_step_end(self, trainer: Any, step: int) -> None:
        self._turns.tick()
