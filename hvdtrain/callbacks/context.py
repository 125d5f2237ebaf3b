"""What a callback sees of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hvdtrain.adapter import State
from hvdtrain.checkpoint.store import Store
from hvdtrain.distributed.world import World


@dataclass(frozen=True)
class RunId:
    """Which run this is; every rank has it, because rank 0 may die first.

    Attributes:
        id: unique among runs.
        name: for people: HVDTRAIN_RUN_NAME, or the script's name and the time.
        resumed: whether an earlier start may have logged under this id.
    """

    id: str
    name: str
    resumed: bool = False


@dataclass(frozen=True, eq=False)
class CheckpointOptions:
    """Where a run's checkpoints go and when one is due; `hvdtrain.callbacks.Checkpoint` explains each option."""

    store: Store
    every_epochs: int
    every_steps: int | None
    best: str | None
    background: bool

    @property
    def schedule(self) -> dict[str, Any]:
        """What all ranks must have alike, because saving takes all of them."""
        return {"every_epochs": self.every_epochs, "every_steps": self.every_steps, "best": self.best}

    def is_due(self, global_step: int) -> bool:
        """Return whether one is due after this step."""
        return self.every_steps is not None and global_step % self.every_steps == 0

    def is_due_after(self, epoch: int, logs: Mapping[str, float]) -> bool:
        """Return whether one is due after this epoch.

        Raises:
            ValueError: the epoch has no metric `best`.
        """
        if self.best is not None and self.best not in logs:
            raise ValueError(f"best must be one of {sorted(logs)}. Received: best={self.best!r}")
        return bool(self.every_epochs) and (epoch + 1) % self.every_epochs == 0


class RunContext(Protocol):
    """A run in progress, equal on all ranks except for `world`; the Trainer is one."""

    model: Any
    world: World
    epochs: int
    hosts: list[str]
    decisions: list[str]
    steps_per_epoch: int | None

    @property
    def config(self) -> dict[str, Any]:
        """What the Trainer and `fit` were given, as JSON."""

    @property
    def global_step(self) -> int:
        """Optimizer steps taken since training began, those before a resumed checkpoint included."""

    @property
    def history(self) -> Mapping[str, list[float]]:
        """What has been recorded so far."""

    @property
    def run(self) -> RunId | None:
        """Which run this is; None before the first."""

    def stop(self) -> None:
        """End the run after this epoch, on every rank; one rank's call is enough."""

    def state(self, *, copy: bool = True) -> State:
        """Return weights and optimizer state; without a copy, as arrays that the next step may change."""

    def load_state(self, state: State) -> None:
        """Load what `state` returned; to be called with the same on every rank."""

    def repair(self) -> None:
        """Give every rank the root's weights and optimizer state; a collective call."""

    def save_checkpoint(self, options: CheckpointOptions) -> None:
        """Save the present state; a collective call. See `hvdtrain.callbacks.Checkpoint.save`."""
