"""Stop when a metric no longer improves."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np

from hvdtrain.adapter import State
from hvdtrain.callbacks.base import Callback, Logs, RunContext
from hvdtrain.checkpoint.store import Mode, improves, sign

log = logging.getLogger("hvdtrain")


class EarlyStopping(Callback):
    """End the run once `monitor` has not improved for `patience` epochs.

    All ranks see the same metrics, so all stop after the same epoch.

    Args:
        monitor: name of a metric in History.
        patience: epochs without improvement that are tolerated; 0 stops at the first.
        min_delta: smallest change that counts as an improvement.
        mode: whether less or more is better; "auto" takes "min" for a loss or an error, else "max".
        restore_best: restore the weights of the best epoch when the run ends early. Checkpoints then hold two
            states, the present and the best.

    Raises:
        ValueError: negative patience or min_delta, or an unknown mode.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        patience: int = 0,
        min_delta: float = 0.0,
        mode: Mode = "auto",
        restore_best: bool = False,
    ) -> None:
        if patience < 0 or min_delta < 0:
            raise ValueError(
                f"patience and min_delta must be >= 0. Received: patience={patience}, min_delta={min_delta}"
            )
        self._monitor, self._sign = monitor, sign(monitor, mode)
        self._patience, self._min_delta = patience, min_delta
        self._restore_best = restore_best
        self._reset()

    def _reset(self) -> None:
        self._best = -math.inf
        self._best_epoch = -1
        self._best_state: State | None = None

    def on_fit_begin(self, trainer: RunContext) -> None:
        """Reset; a resumed run reads its earlier epochs from the history."""
        self._reset()
        for epoch, value in enumerate(trainer.history.get(self._monitor, [])):
            if self._improves(value, epoch):
                self._best_state = None  # unless the checkpoint has it
            elif epoch - self._best_epoch > self._patience:
                trainer.stop()

    def on_epoch_end(self, trainer: RunContext, epoch: int, logs: Logs) -> None:
        """Compare, and stop the run when patience is exhausted."""
        if self._monitor not in logs:
            raise ValueError(f"monitor must be one of {sorted(logs)}. Received: monitor={self._monitor!r}")
        if self._improves(logs[self._monitor], epoch):
            if self._restore_best:
                self._best_state = trainer.state()
        elif epoch - self._best_epoch > self._patience:
            if trainer.world.is_root:
                log.info("stop: %s has not improved since epoch %d", self._monitor, self._best_epoch + 1)
            trainer.stop()
            if self._best_state is not None:
                trainer.load_state(self._best_state)

    def state(self) -> dict[str, Any]:
        """Return the best epoch's weights and optimizer state."""
        best = self._best_state
        return {} if best is None else {"epoch": self._best_epoch, "meta": best.meta, **best.arrays}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore them, if that epoch is the best for this run's options too."""
        if self._restore_best and state["epoch"] == self._best_epoch:
            arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
            self._best_state = State(arrays, state["meta"])

    def _improves(self, value: float, epoch: int) -> bool:
        """Return whether this is the best epoch so far, and remember it."""
        if not improves(self._sign * value, self._best, min_delta=self._min_delta):
            return False
        self._best, self._best_epoch = self._sign * value, epoch
        return True
