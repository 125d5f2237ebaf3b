"""Keep checkpoints while training, so that a run that is killed goes on where it was."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from hvdtrain.callbacks.base import Callback, Logs
from hvdtrain.callbacks.context import RunContext
from hvdtrain.system import scratch

if TYPE_CHECKING:
    from hvdtrain.training.checkpointing import Keeper


class Checkpoint(Callback):
    """Write a checkpoint after epochs, and every so many steps; `fit` goes on from the newest whole one.

    `fit(checkpoint_dir=...)` is short for one of these with its defaults. Rank 0 writes, in the background: training
    waits while the state is copied. All ranks' random states, the position in the data and what metrics have counted
    are part of it, so that a run that was killed ends as if it never had been.

    Args:
        directory: of this run alone; while `fit` runs, another run cannot use it.
        every_epochs: epochs between checkpoints; 0 for none at epochs' ends.
        every_steps: optimizer steps between checkpoints, counted over all epochs; None for none within epochs.
        keep_last: how many of the newest are kept; None keeps all.
        best: name of a metric; the epoch's checkpoint that is best by it is kept besides.
        mode: whether less or more is better; "auto" takes "min" for a loss or an error, else "max".
        background: False writes each before training goes on.

    Raises:
        ValueError: an option outside its range.
        CheckpointError: in `fit`, before the first epoch, where another run holds the folder, it cannot be written, or
            its disk has no space for one checkpoint; else at the checkpoint after one that could not be written, or at
            the end: what was written before is kept, and so is the state in memory.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_epochs: int = 1,
        every_steps: int | None = None,
        keep_last: int | None = 3,
        best: str | None = None,
        mode: Literal["auto", "min", "max"] = "auto",
        background: bool = True,
    ) -> None:
        if every_epochs < 0 or (every_steps is not None and every_steps < 1) or not (every_epochs or every_steps):
            raise ValueError(
                "every_epochs must be >= 0, every_steps >= 1 or None, and one of them must be given. Received: "
                f"every_epochs={every_epochs}, every_steps={every_steps}"
            )
        from hvdtrain.checkpoint.store import Store

        self._store = Store(scratch.place(directory), keep_last=keep_last, best=best, mode=mode)
        self._best = best
        self._every_epochs = every_epochs
        self._every_steps = every_steps
        self._background = background
        self.keeper: Keeper | None = None
        self._kept_at = 0

    @property
    def moments(self) -> dict[str, Any]:
        """The options that all ranks must have alike: they say when the state is kept, which takes all of them."""
        return {"every_epochs": self._every_epochs, "every_steps": self._every_steps, "best": self._best}

    def open(self, trainer: RunContext) -> Keeper:
        """Return what writes and finds the checkpoints of this run; called by `fit` before it begins."""
        from hvdtrain.training.checkpointing import Keeper

        self.keeper = Keeper(self._store, background=self._background, world=trainer.world)
        return self.keeper

    def on_fit_begin(self, trainer: RunContext) -> None:
        """Begin to count: what a run goes on from is kept already."""
        self._kept_at = trainer.global_step

    def on_step_end(self, trainer: RunContext, step: int) -> None:
        """Keep the state if it is time."""
        if self._every_steps and trainer.global_step % self._every_steps == 0:
            self.save(trainer)

    def on_epoch_end(self, trainer: RunContext, epoch: int, logs: Logs) -> None:
        """Keep the state if it is time."""
        if self._best is not None and self._best not in logs:
            raise ValueError(f"best must be one of {sorted(logs)}. Received: best={self._best!r}")
        if self._every_epochs and (epoch + 1) % self._every_epochs == 0:
            self.save(trainer)

    def on_fit_end(self, trainer: RunContext) -> None:
        """Keep how the run has ended, early or not, and wait until everything is written."""
        if self._every_epochs and self._kept_at != trainer.global_step:
            self.save(trainer)
        if self.keeper is not None:
            self.keeper.wait()

    def save(self, trainer: RunContext) -> None:
        """Keep the present state, whether or not it is time; a collective call."""
        self._kept_at = trainer.global_step
        trainer.keep(self.keeper or self.open(trainer))
