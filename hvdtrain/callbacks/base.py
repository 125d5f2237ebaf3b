"""What a callback may do, and how several are run as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdtrain.trainer import Trainer

Logs = dict[str, float]


class Callback:
    """Override what you need; every method does nothing by default.

    Callbacks run on every rank. Metrics in `logs` are equal on all ranks, so a decision taken on them is taken by all;
    guard I/O with `trainer.world.is_root`. To end the run after the current epoch, call `trainer.stop()`: it is enough
    that one rank does.
    """

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Run once, when weights are equal on all ranks and before the first epoch."""

    def on_epoch_begin(self, trainer: Trainer, epoch: int) -> None:
        """Run before the first step of an epoch; epochs count from 0."""

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        """Run before an optimizer step; steps count from 0 in each epoch."""

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        """Run after an optimizer step."""

    def on_epoch_end(self, trainer: Trainer, epoch: int, logs: Logs) -> None:
        """Run after training and validation of an epoch; `logs` is what History keeps of it."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """Run once, after the last epoch."""


class CallbackList(Callback):
    """Runs callbacks in the order given."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Call each."""
        for callback in self._callbacks:
            callback.on_fit_begin(trainer)

    def on_epoch_begin(self, trainer: Trainer, epoch: int) -> None:
        """Call each."""
        for callback in self._callbacks:
            callback.on_epoch_begin(trainer, epoch)

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        """Call each."""
        for callback in self._callbacks:
            callback.on_step_begin(trainer, step)

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        """Call each."""
        for callback in self._callbacks:
            callback.on_step_end(trainer, step)

    def on_epoch_end(self, trainer: Trainer, epoch: int, logs: Logs) -> None:
        """Call each."""
        for callback in self._callbacks:
            callback.on_epoch_end(trainer, epoch, logs)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Call each."""
        for callback in self._callbacks:
            callback.on_fit_end(trainer)
