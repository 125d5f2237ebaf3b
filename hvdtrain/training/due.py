"""The actions that wait until all ranks hold equal weights."""

from __future__ import annotations

from hvdtrain.training.checkpointing import RunCheckpoints


class Due:
    """Checkpoints, a validation and a stop that are due, the same on all ranks.

    With `sync`, ranks hold different weights between two synchronizations: what is due then comes after the next one.

    Attributes:
        checkpoints: the folders in which a checkpoint is due, in the order in which they will be saved.
        validation: True if a validation within the epoch is due.
        stop: True if a signal has requested a stop, or if the hosts of an elastic job have changed.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Note that nothing is due."""
        self.checkpoints: list[RunCheckpoints] = []
        self.validation = self.stop = False

    def __bool__(self) -> bool:
        return bool(self.checkpoints) or self.validation or self.stop

    def add(self, checkpoints: RunCheckpoints) -> None:
        """Note that a checkpoint is due in this folder."""
        if checkpoints not in self.checkpoints:
            self.checkpoints.append(checkpoints)

    def saved(self, checkpoints: RunCheckpoints) -> None:
        """Note that the current state was saved in this folder."""
        if checkpoints in self.checkpoints:
            self.checkpoints.remove(checkpoints)
