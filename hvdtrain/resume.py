"""Write a run's progress and take it up again: rank 0 does the I/O, every rank learns of its outcome."""

from __future__ import annotations

import logging
from typing import Any

from hvdtrain import agreement, checkpoint, learning_rate
from hvdtrain.adapter import Adapter, State
from hvdtrain.errors import CheckpointError
from hvdtrain.world import World

log = logging.getLogger("hvdtrain")


def save(directory: Any, adapter: Adapter, meta: dict[str, Any], *, world: World) -> None:
    """Write weights, optimizer state and `meta` (JSON) to `directory`.

    Raises:
        CheckpointError: it could not be written; on other ranks, a HvdTrainError that says so.
    """

    def write() -> None:
        state = adapter.state()
        checkpoint.save(directory, state.arrays, {**meta, "adapter": state.meta, "world_size": world.size})

    agreement.together(write, world=world, name="save")


def read_config(directory: Any, *, world: World) -> dict[str, Any]:
    """Return the options that the checkpoint's Trainer had."""
    config: dict[str, Any] = agreement.together(
        lambda: checkpoint.load(directory)[1]["config"], world=world, name="load"
    )
    return config


def restore(directory: Any, adapter: Adapter, *, lr_factor: float, world: World) -> dict[str, Any]:
    """Load a checkpoint on the root, and return its meta data; `adapter.start` gives the others the root's state.

    Args:
        directory: one checkpoint; the other ranks need not see rank 0's disk.
        adapter: what takes on the state.
        lr_factor: this run's scaling. Restored rates carry the scaling of the number of ranks that wrote them.
        world: the ranks.

    Raises:
        CheckpointError: it is missing, damaged, or of another model (named tensor).
    """

    def read() -> dict[str, Any]:
        arrays, meta = checkpoint.load(directory)
        try:
            adapter.load_state(State(arrays, meta.pop("adapter")))
        except ValueError as error:
            raise CheckpointError(f"Checkpoint {directory} is of another model: {error}") from error
        before = learning_rate.factor(meta["config"]["lr_scaling"], meta["world_size"])
        if before != lr_factor:
            rates = adapter.learning_rates
            adapter.learning_rates = [rate * lr_factor / before for rate in rates]
            log.info("lr %s -> %s (written on %d ranks)", rates, adapter.learning_rates, meta["world_size"])
        return meta

    meta: dict[str, Any] = agreement.together(read, world=world, name="restore")
    return meta


def newest_whole(checkpoint_dir: str, *, world: World) -> str | None:
    """Return the newest checkpoint that is whole, saying which are skipped and why; None where there is none."""

    def search() -> str | None:
        for path in checkpoint.newest_first(checkpoint_dir):
            try:
                checkpoint.load(path)
            except CheckpointError as error:
                log.warning("skipped: %s", error)
            else:
                log.info("resume from %s", path)
                return str(path)
        return None

    found: str | None = agreement.together(search, world=world, name="resume")
    return found


def set_aside(checkpoint_dir: str, *, world: World) -> None:
    """Move an older run's checkpoints to where a later "auto" does not take them for this run's."""

    def move() -> None:
        aside = checkpoint.set_aside(checkpoint_dir)
        if aside is not None:
            log.info("moved older checkpoints to %s", aside)

    agreement.together(move, world=world, name="set aside")
