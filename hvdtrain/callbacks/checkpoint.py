"""When a run saves checkpoints, and where."""

from __future__ import annotations

import os
from typing import Literal

from hvdtrain.callbacks.base import Callback
from hvdtrain.callbacks.context import CheckpointOptions, RunContext
from hvdtrain.checkpoint.store import Store
from hvdtrain.system import scratch


class Checkpoint(Callback):
    """Save a checkpoint after epochs, and every so many steps; `fit` resumes from the newest whole one.

    `fit(checkpoint_dir=...)` is short for one of these with its defaults. Rank 0 writes in the background; training
    waits only while the state is copied. A checkpoint holds all ranks' random states, the progress in the data and the
    running metrics, so that a run that was killed ends as if it had not been.

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
        self.checkpoint: CheckpointOptions = CheckpointOptions(
            Store(scratch.place(directory), keep_last=keep_last, best=best, mode=mode),
            every_epochs=every_epochs,
            every_steps=every_steps,
            best=best,
            background=background,
        )

    def save(self, trainer: RunContext) -> None:
        """Save the present state, whether or not a checkpoint is due; a collective call."""
        trainer.save_checkpoint(self.checkpoint)
