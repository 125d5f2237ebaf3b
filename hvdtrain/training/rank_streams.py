"""Give each rank of a fit random streams of its own: `Trainer(rank_streams=True)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from hvdtrain.adapter import Adapter
from hvdtrain.distributed import rank_state, streams
from hvdtrain.distributed.rank_state import Arrays
from hvdtrain.distributed.world import World
from hvdtrain.training.progress import RunProgress
from hvdtrain.training.validation import load_rank_state

# In `rank_state`: the key of the common stream, and the number of an epoch that was drawn without it, or -1. A
# checkpoint without this is of one rank, or of ranks that drew alike.
_KEY = "max.streams"


class RankStreams:
    """The random streams of the ranks of a fit, and the one that they share."""

    def __init__(self, adapter: Adapter, world: World) -> None:
        self._adapter, self._world = adapter, world
        self._key: int | None = None
        self._own: Arrays = {}  # states of this rank while `alike` has changed them
        self._alike: set[str] = set()  # generators that were alike on all ranks when fit began
        self._unseeded: int | None = None  # the epoch that resumes, if it was drawn before ranks shared a stream

    def begin(self, held: Arrays, progress: RunProgress, *, is_own: bool, in_threads: bool) -> Arrays:
        """Give this rank its streams; a collective. Return what of a checkpoint is to be loaded when steps begin.

        Args:
            held: this rank's arrays of the checkpoint that the run resumes from; its random states replace the streams.
            progress: of the run.
            is_own: False leaves the generators as they are.
            in_threads: threads of a framework draw from Python's and NumPy's generators: ranks keep these alike.
        """
        known, self._alike = held.get(_KEY), set()
        self._key = None if known is None else int(known[0])
        drawn_without = known is None or known[1] == progress.epoch
        self._unseeded = progress.epoch if progress.step and drawn_without else None
        if self._world.grid is not None and not streams.are_alike_in_replicas(_random(held), world=self._world):
            held = _without_random(held)  # of another Grid
        if is_own and self._world.size > 1:
            has_joined = bool(held) and not _random(held)  # the checkpoint has no states for this rank
            if known is None and held:  # continue from the states of the checkpoint, which may be alike
                load_rank_state(self._adapter, _random(held))
                held = _without_random(held)
            # A rank that has joined is where the script has seeded it: there, rank 0 was when the run began.
            how = {"every": has_joined, "in_threads": in_threads}
            found = streams.separate(
                self.states(), self._adapter.reseed, world=self._world, step=progress.global_step, **how
            )
            self._key = streams.key_of(found) if known is None else self._key
            self._alike = streams.alike(found)
        streams.share(self._key, unseeded=self._unseeded)
        return held

    def at_begin(self, mine: Arrays) -> Arrays:
        """Return the states from which all ranks draw the order of the epoch that resumes.

        `mine` are this rank's when the epoch began. Without a common stream the order was drawn from rank 0's, which a
        rank that has joined since then does not have.
        """
        return mine if self._unseeded is None else rank_state.broadcast(mine, world=self._world)

    def end(self) -> Arrays:
        """Give rank 0's states to the generators that were alike when fit began; return this rank's; a collective.

        What follows a fit may split data or build a model.
        """
        streams.share(None)
        if not self._alike:
            return {}
        own = self.states()
        load_rank_state(self._adapter, rank_state.broadcast(streams.states_of(self._alike, own), world=self._world))
        return own

    @contextmanager
    def alike(self, *place: str | int) -> Iterator[None]:
        """Let the block draw equal numbers on all ranks, which `place` determines: it may choose or order samples."""
        if self._key is None:
            yield
            return
        self._own = self.states()
        seeds = streams.common_seeds(streams.generators_in(self._own), self._key, *place)
        streams.reseed(seeds)
        self._adapter.reseed(seeds)
        try:
            yield
        finally:
            own, self._own = self._own, {}
            load_rank_state(self._adapter, own)

    def states(self) -> Arrays:
        """Return the states of all generators of this rank."""
        return _random(rank_state.random_states() | self._adapter.rank_state)

    def saved(self) -> Arrays:
        """Return what a checkpoint holds besides the states, or instead of those that `alike` has changed for now."""
        unseeded = -1 if self._unseeded is None else self._unseeded
        return {} if self._key is None else {_KEY: np.array([self._key, unseeded], np.int64)} | self._own


def _random(arrays: Arrays) -> Arrays:
    """Return the states of the global generators and the model's; those that data hold stay as they are."""
    names = (name for name in arrays if name.startswith("random.") and not name.startswith(rank_state.OF_DATA))
    return {name: arrays[name] for name in names}


def _without_random(arrays: Arrays) -> Arrays:
    """Return all other arrays."""
    left_out = _random(arrays)
    return {name: array for name, array in arrays.items() if name not in left_out}
