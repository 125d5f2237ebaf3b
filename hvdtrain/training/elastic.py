"""`Trainer.fit` in an elastic job: when ranks come, go or die, a new round resumes from the last commit."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hvdtrain.checkpoint import Contents
from hvdtrain.distributed import elastic, frameworks, rank_state
from hvdtrain.distributed.world import World
from hvdtrain.sync.synchronizer import Synchronizer
from hvdtrain.training import checkpointing, packing
from hvdtrain.training.checkpointing import Snapshot


class FitState(elastic.State):
    """The last commit, in every rank's memory, because any rank may die; and what Horovod's driver reports of hosts."""

    def __init__(self, sync: Synchronizer, world: World) -> None:
        super().__init__(bcast_object=world.broadcast_object, get_rank=lambda: world.rank)
        self._sync = sync
        self._world = world
        self._saved: Contents | None = None

    @property
    def hosts_have_changed(self) -> bool:
        """True if the driver has reported a change of hosts. It reports to rank 0 only."""
        return not self._host_messages.empty()

    def commit(self, snapshot: Snapshot) -> None:
        """Replace the last commit by a copy of the current state; a collective call."""
        shards = self._sync.adapter.shard_commits
        everyones = rank_state.gather(snapshot.arrays, world=self._world, everywhere=True)
        state = self._sync.state()
        contents = packing.pack(state, everyones, snapshot.meta, world=self._world, copy=True)
        contents = replace(contents, elsewhere=frozenset(state.sharded))
        if shards is not None:
            shards.prepare()
        self._saved = contents
        if shards is not None:
            shards.confirm()

    def find(self, *, lr_factor: float) -> Snapshot | None:
        """Load the root's last commit, if it has one; see `checkpointing.load`.

        Raises:
            LostShardError: on every rank, if a part of the state was lost with the ranks that held it.
        """

        def find() -> tuple[Path, Contents] | None:
            # A copy of the meta data, because restoring removes parts of it.
            if self._saved is None:
                return None
            return Path("in memory"), replace(self._saved, meta=dict(self._saved.meta))

        found = checkpointing.restore(find, self._sync, lr_factor=lr_factor, world=self._world)
        shards = self._sync.adapter.shard_commits
        if shards is not None:
            shards.load()
        return found

    def begin_next_round(self) -> None:
        """End this round of `fit`, on all ranks."""
        raise importlib.import_module("horovod.common.exceptions").HostsUpdatedInterrupt(False)

    def restore(self) -> None:
        """Load this rank's copy, to undo a step that has failed."""
        if self._saved is not None:
            self._sync.load_state(packing.unpack(self._saved))

    def sync(self) -> None:
        """Do nothing: `fit` synchronizes at its beginning."""


def run(fit_round: Callable[[], None], state: FitState, framework: str) -> None:
    """Call `fit_round`, and again whenever ranks come, go or die; it resumes from the last commit."""
    reset = frameworks.load(framework, "elastic").reset
    elastic.run_fn(lambda _: fit_round(), reset)(state)
