"""What a callback sees of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hvdtrain.adapter import State
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


class RunContext(Protocol):
    """A run in progress, equal on all ranks but for `world`; the Trainer is one."""

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

    def keep(self, keeper: Any) -> None:
        """Have the present state saved; a collective call. See `hvdtrain.callbacks.Checkpoint`."""
