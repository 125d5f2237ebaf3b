"""The run, as callbacks see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hvdtrain.adapter import State
from hvdtrain.checkpoint.store import Store
from hvdtrain.distributed.world import World


@dataclass(frozen=True)
class RunId:
    """Identifies a run. Every rank has it, because rank 0 may die first.

    Attributes:
        id: unique among runs.
        name: a name for people: HVDTRAIN_RUN_NAME, or script and time.
        resumed: whether an earlier attempt may have logged under this id.
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
        """The options that must be equal on all ranks, because saving is a collective."""
        return {"every_epochs": self.every_epochs, "every_steps": self.every_steps, "best": self.best}

    def is_due(self, global_step: int) -> bool:
        """Return whether a checkpoint is due after this step."""
        return self.every_steps is not None and global_step % self.every_steps == 0

    def is_due_after(self, epoch: int, logs: Mapping[str, float]) -> bool:
        """Return whether a checkpoint is due after this epoch; ValueError if it has no metric `best`."""
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
        """The arguments of the Trainer and of `fit`, as JSON."""

    @property
    def global_step(self) -> int:
        """Optimizer steps since training began; those before a checkpoint count."""

    @property
    def history(self) -> Mapping[str, list[float]]:
        """The metrics of each epoch so far."""

    @property
    def run(self) -> RunId | None:
        """The run's identity; None before the first `fit`."""

    def stop(self) -> None:
        """End the run after this epoch, on every rank. One rank's call is enough."""

    def state(self, *, copy: bool = True) -> State:
        """Return weights and optimizer state. With copy=False, the next step may change the arrays."""

    def load_state(self, state: State) -> None:
        """Restore what `state` returned. Call it with the same state on every rank."""

    def repair(self) -> None:
        """Broadcast the root's weights and optimizer state. A collective."""

    def save_checkpoint(self, options: CheckpointOptions) -> None:
        """Save the current state. A collective. See `hvdtrain.callbacks.Checkpoint.save`."""
