"""Save checkpoints of a run: the schedule and the folder."""

from __future__ import annotations

import os

from hvdtrain.callbacks.base import Callback, CheckpointOptions, RunContext
from hvdtrain.checkpoint.store import Mode, Store
from hvdtrain.system import scratch


class Checkpoint(Callback):
    """Save a checkpoint after epochs, and every so many steps. `fit` resumes from the newest complete one.

    `fit(checkpoint_dir=...)` is short for one of these with its defaults. Rank 0 writes in the background; training
    waits only while the state is copied, or with `Trainer(shard=...)` gathered into the file. A checkpoint contains all
    ranks' random states, the progress in the data and the running metrics, so that a resumed run equals one that never
    stopped.

    Args:
        directory: the folder of this run; while `fit` runs, another run cannot use it.
        every_epochs: epochs between checkpoints; 0 for none at epochs' ends.
        every_steps: optimizer steps between checkpoints, counted over all epochs; None for no checkpoint within epochs.
        keep_last: number of newest checkpoints that are not deleted; None for all.
        best: name of a metric; the checkpoint with its best value is not deleted either. If validations within epochs
            have the metric, a checkpoint is written after each of them.
        mode: "min" or "max" is better; "auto" is "min" for a loss or an error, else "max".
        background: False writes each checkpoint before training continues.
        frozen: False leaves frozen weights out: those with requires_grad=False, or of Keras layers with
            trainable=False. A checkpoint then holds a hash of each. Who loads it builds the model with the same ones;
            others are a CheckpointError that names the weight. Frozen weights that an earlier `fit` has trained are
            left out too: save them before, with `Trainer.save`.

    Raises:
        ValueError: an option outside its range.
        CheckpointError: in `fit`, before the first epoch, if another run uses the folder, if it cannot be written, or
            if its disk has no space for one checkpoint. If the disk fails to take a later one, a line says so and the
            run continues; at the end of `fit`, if that was the last one. Older checkpoints and the state in memory do
            not change.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_epochs: int = 1,
        every_steps: int | None = None,
        keep_last: int | None = 3,
        best: str | None = None,
        mode: Mode = "auto",
        background: bool = True,
        frozen: bool = True,
    ) -> None:
        if every_epochs < 0 or (every_steps is not None and every_steps < 1) or not (every_epochs or every_steps):
            raise ValueError(
                "every_epochs must be >= 0, every_steps >= 1 or None, and one of them must be given. Received: "
                f"every_epochs={every_epochs}, every_steps={every_steps}"
            )
        store = Store(scratch.place(directory), keep_last=keep_last, best=best, mode=mode)
        self.checkpoint: CheckpointOptions = CheckpointOptions(
            store, every_epochs, every_steps, best, background, frozen
        )

    def save(self, trainer: RunContext) -> None:
        """Save the current state, also if no checkpoint is due. A collective."""
        trainer.save_checkpoint(self.checkpoint)
