"""`Trainer.fit` in an elastic job: its state is kept in every rank's memory, and ranks that meet anew go on from it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain.adapter import Adapter, framework_of
from hvdtrain.distributed import elastic, frameworks
from hvdtrain.distributed.rank_state import Arrays
from hvdtrain.distributed.world import World
from hvdtrain.training import checkpointing

if TYPE_CHECKING:
    from hvdtrain.training.loop import Loop
    from hvdtrain.training.trainer import Trainer


class FitState(elastic.State):
    """What Horovod's driver tells of hosts, and the last commit.

    Ranks are given the root's commit by `fit` itself, as they are given a checkpoint.

    Args:
        adapter: takes the steps.
        world: the ranks.
    """

    def __init__(self, adapter: Adapter, world: World) -> None:
        super().__init__(bcast_object=world.broadcast_object, get_rank=lambda: world.rank)
        self._adapter = adapter
        self._world = world
        self._memory = checkpointing.Memory(world)

    @property
    def hosts_have_changed(self) -> bool:
        """Whether the driver has said so, which it says to rank 0 alone."""
        return not self._host_messages.empty()

    def commit(self, loop: Loop) -> None:
        """Keep the present state; a collective call."""
        self._memory.save(self._adapter, loop.own(), loop.progress())

    def find(self, *, lr_factor: float) -> tuple[dict[str, Any], Arrays] | None:
        """Load the root's last commit, if it has one; see `hvdtrain.training.checkpointing.restore`."""
        return self._memory.restore(self._adapter, lr_factor=lr_factor)

    def meet_anew_unless(self, asked: bool, loop: Loop) -> None:
        """End this round of `fit`, on all ranks, unless one of them was `asked` to stop; a collective call.

        Raises:
            HostsUpdatedInterrupt: for `run`.
        """
        if self._world.allreduce(np.array([asked], np.int32), "max", name="stop")[0]:
            return
        self.commit(loop)
        raise importlib.import_module("horovod.common.exceptions").HostsUpdatedInterrupt(False)

    def restore(self) -> None:
        """Drop the step that has failed, on this rank."""
        self._memory.go_back(self._adapter)

    def sync(self) -> None:
        """Do nothing: `fit` begins with it."""


def run(trainer: Trainer, once: Callable[[], None], adapter: Adapter) -> None:
    """Run `once`, which fits from the last commit on, again whenever ranks come, go or die."""
    reset = frameworks.load(framework_of(trainer.model), "elastic").reset
    trainer.kept = FitState(adapter, trainer.world)
    try:
        elastic.run_fn(lambda _: once(), reset)(trainer.kept)
    finally:
        trainer.kept = None
