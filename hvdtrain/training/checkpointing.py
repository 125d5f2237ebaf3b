"""Write a run's state and take it up again: rank 0 does the I/O, every rank learns of its outcome."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain import checkpoint
from hvdtrain.adapter import Adapter, State
from hvdtrain.callbacks.base import with_arrays, without_arrays
from hvdtrain.checkpoint import Contents
from hvdtrain.checkpoint.lock import FolderLock, Holder
from hvdtrain.checkpoint.store import Store
from hvdtrain.checkpoint.writer import Writer
from hvdtrain.distributed import agreement, rank_state
from hvdtrain.distributed.rank_state import Arrays
from hvdtrain.distributed.world import World
from hvdtrain.errors import CheckpointError
from hvdtrain.system import scratch
from hvdtrain.system.settings import RUN_ID
from hvdtrain.training import learning_rate
from hvdtrain.training.run_id import RunId

log = logging.getLogger("hvdtrain")

# What `State.arrays` begin with, and the files that they go to.
_FILES = ("model", "optimizer")
# How long an earlier start of this run may take to end. NFS 4 keeps a lost host's locks for a minute and a half.
_OWN_WRITER_S = 120.0
# Where callbacks' arrays are; and, on their way to the ranks, what their names begin with: equal on all of them.
_CALLBACKS, _OF_CALLBACKS = "callbacks", "max.callback."


class Keeper:
    """Keeps a run's checkpoints in one folder, and writes them while training goes on.

    Every rank has one and calls it at the same moments; rank 0's does the I/O. What fails while a checkpoint is
    written is raised, on every rank, when the next one is begun, or by `wait`.

    Args:
        store: where, and which are kept.
        background: False writes each before `save` returns.
        world: the ranks.
    """

    def __init__(self, store: Store, *, background: bool, world: World) -> None:
        self._store = store
        self._background = background
        self._world = world
        self._writer = Writer()
        self._lock = FolderLock(store.root)

    def hold(self, run: RunId, *, before: RunId | None) -> None:
        """Lock the folder for this run, until `finish`; a collective call.

        Args:
            run: which this is, unless it resumes another.
            before: which this process was in before, in an elastic job: ranks that meet again wait for its writer.

        Raises:
            CheckpointError: another run is; on other ranks, a HvdTrainError that says so.
        """
        job = os.environ.get(RUN_ID)

        def is_own(other: Holder) -> bool:
            return (job is not None and other.job == job) or (before is not None and other.run == before.id)

        holder = Holder.here(run.id, run.name, job)
        agreement.together(
            lambda: self._lock.acquire(holder, is_own=is_own, limit_s=_OWN_WRITER_S), world=self._world, name="lock"
        )

    def begin(self, adapter: Adapter, run: RunId) -> None:
        """See that a checkpoint can be written, before there is training to lose; a collective call.

        Args:
            adapter: whose state will be written.
            run: which run this is, the one that it resumes included.

        Raises:
            CheckpointError: it cannot; on other ranks, a HvdTrainError that says so.
        """

        def check() -> None:
            self._lock.describe(Holder.here(run.id, run.name, os.environ.get(RUN_ID)))
            # What the first step makes is not counted, so that no disk is refused that is large enough: the state of
            # most optimizers, and all of a model of lazy modules, which torch lets nobody ask for its weights yet.
            num_bytes = 0
            with suppress(ValueError):
                num_bytes = sum(array.nbytes for array in adapter.state().arrays.values())
            self._store.check_writable(num_bytes)

        agreement.together(check, world=self._world, name="checkpoint folder")

    def save(self, adapter: Adapter, ranks: Arrays, meta: dict[str, Any]) -> None:
        """Keep the present state; training waits while it is copied, and for an earlier one that is still written.

        Args:
            adapter: whose state.
            ranks: what this rank holds of its own.
            meta: the rest, as JSON; with a `position`.

        Raises:
            CheckpointError: an earlier one could not be written; on other ranks, a HvdTrainError that says so.
        """
        kept = rank_state.gather(ranks, world=self._world)
        agreement.together(lambda: self._submit(adapter, kept, meta), world=self._world, name="save")

    def _submit(self, adapter: Adapter, kept: Arrays, meta: dict[str, Any]) -> None:
        self._writer.wait()
        contents = _contents(adapter.state(), kept, meta, world=self._world, copy=self._background)
        place = self._store.place(meta["position"]["epoch"], meta["position"]["step"])
        self._writer.submit(place, contents, then=self._store.prune)
        if not self._background:
            self._writer.wait()

    def wait(self) -> None:
        """Return once all that was begun is written; a collective.

        Raises:
            CheckpointError: as `save`.
        """
        agreement.together(self._writer.wait, world=self._world, name="save")

    def finish(self) -> None:
        """Let what was begun be written, and give the folder back; on this rank alone, however the run ends."""
        try:
            with suppress(Exception):  # it was logged, and must not hide the other one
                self._writer.wait()
        finally:
            self._lock.release()

    def set_aside(self) -> None:
        """Move an older run's checkpoints to where a later "auto" does not take them for this run's."""

        def move() -> None:
            aside = self._store.set_aside()
            if aside is not None:
                log.info("moved older checkpoints to %s", aside)

        agreement.together(move, world=self._world, name="set aside")

    def restore(self, adapter: Adapter, *, lr_factor: float) -> tuple[dict[str, Any], Arrays] | None:
        """Load the newest checkpoint that is whole, saying which are skipped and why; None where there is none.

        See `restore` for what is returned and raised.
        """

        def find() -> tuple[Path, Contents] | None:
            self._store.clear_leftovers()
            found = self._store.newest_whole()
            if found is not None and not found[1].finite:
                finite = self._store.newest_finite()
                _warn_not_finite(
                    found[0],
                    f"to resume from {finite}, move later ones away." if finite else 'fit(resume="never") starts anew.',
                )
            return found

        return _restore(find, adapter, lr_factor=lr_factor, world=self._world)


@contextmanager
def held(keepers: Sequence[Keeper], run: RunId, *, before: RunId | None) -> Iterator[Sequence[Keeper]]:
    """Hold the keepers' folders, and let what they have begun be written, however the block ends; see `Keeper.hold`."""
    try:
        for keeper in keepers:
            keeper.hold(run, before=before)
        yield keepers
    finally:
        for keeper in keepers:
            keeper.finish()


class Memory:
    """Keeps a run's state in every rank's memory, for those that are left when others die; see `Keeper`.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._kept: Contents | None = None

    def save(self, adapter: Adapter, ranks: Arrays, meta: dict[str, Any]) -> None:
        """Keep a copy of the present state in place of the one before; a collective call."""
        everyones = rank_state.gather(ranks, world=self._world, everywhere=True)
        self._kept = _contents(adapter.state(), everyones, meta, world=self._world, copy=True)

    def go_back(self, adapter: Adapter) -> None:
        """Load this rank's own copy, if it has one, so that nothing is left of a step that has failed."""
        if self._kept is not None:
            adapter.load_state(_state(self._kept))

    def restore(self, adapter: Adapter, *, lr_factor: float) -> tuple[dict[str, Any], Arrays] | None:
        """Load the root's copy on the root; None where it has none. See `restore` for what is returned."""

        def find() -> tuple[Path, Contents] | None:
            # Reading takes parts out of the meta data.
            if self._kept is None:
                return None
            return Path("in memory"), Contents(self._kept.arrays, dict(self._kept.meta))

        return _restore(find, adapter, lr_factor=lr_factor, world=self._world)


def save(directory: Any, adapter: Adapter, ranks: Arrays, meta: dict[str, Any], *, world: World) -> None:
    """Write one checkpoint to `directory`; for the arguments and errors see `Keeper.save`."""
    kept = rank_state.gather(ranks, world=world)
    agreement.together(
        lambda: checkpoint.write(
            scratch.place(directory), _contents(adapter.state(), kept, meta, world=world, copy=False)
        ),
        world=world,
        name="save",
    )


def read_config(directory: Any, *, world: World) -> dict[str, Any]:
    """Return the options that the checkpoint's Trainer had."""
    config: dict[str, Any] = agreement.together(
        lambda: checkpoint.read_meta(scratch.found(directory))["config"], world=world, name="load"
    )
    return config


def restore(directory: Any, adapter: Adapter, *, lr_factor: float, world: World) -> tuple[dict[str, Any], Arrays]:
    """Load a checkpoint on the root; `adapter.start` gives the others the root's state.

    Args:
        directory: one checkpoint; the other ranks need not see rank 0's disk.
        adapter: what takes on the state.
        lr_factor: this run's scaling. Restored rates carry the scaling of the number of ranks that wrote them.
        world: the ranks.

    Returns:
        Its meta data, and what this rank takes on of its own once everything else is in place.

    Raises:
        CheckpointError: it is missing, damaged, or of another model (named tensor).
    """

    def find() -> tuple[Path, Contents]:
        place = scratch.found(directory)
        contents = checkpoint.read(place)
        if not contents.finite:
            _warn_not_finite(place, "load an earlier one.")
        return place, contents

    found = _restore(find, adapter, lr_factor=lr_factor, world=world)
    if found is None:
        raise CheckpointError(f"Checkpoint {directory} is missing.")
    return found


def _warn_not_finite(directory: Any, advice: str) -> None:
    log.warning(
        "checkpoint %s will be restored, though it holds NaN or infinity. If that is not meant: %s", directory, advice
    )


def _restore(
    find: Callable[[], tuple[Path, Contents] | None], adapter: Adapter, *, lr_factor: float, world: World
) -> tuple[dict[str, Any], Arrays] | None:
    kept: Arrays = {}

    def read() -> dict[str, Any] | None:
        found = find()
        if found is None:
            return None
        directory, contents = found
        meta = contents.meta
        try:
            adapter.load_state(_state(contents))
        except ValueError as error:
            raise CheckpointError(f"Checkpoint {directory} is of another model: {error}") from error
        del meta["adapter"]
        before = learning_rate.factor(meta["config"]["lr_scaling"], meta["world_size"])
        if before != lr_factor:
            rates = adapter.learning_rates
            adapter.learning_rates = [rate * lr_factor / before for rate in rates]
            log.info("lr %s -> %s (written on %d ranks)", rates, adapter.learning_rates, meta["world_size"])
        kept.update(contents.arrays.get("ranks", {}))
        kept.update({f"0/{_OF_CALLBACKS}{name}": a for name, a in contents.arrays.get(_CALLBACKS, {}).items()})
        return meta

    meta: dict[str, Any] | None = agreement.together(read, world=world, name="restore")
    if meta is None:
        return None
    mine = rank_state.deal(kept, world=world)
    names = [name for name in mine if name.startswith(_OF_CALLBACKS)]
    meta["callbacks"] = with_arrays(
        meta["callbacks"], {name.removeprefix(_OF_CALLBACKS): mine.pop(name) for name in names}
    )
    return meta, mine


def _state(contents: Contents) -> State:
    arrays = {f"{name}.{key}": a for name in _FILES for key, a in contents.arrays.get(name, {}).items()}
    return State(arrays, contents.meta["adapter"])


def _contents(state: State, kept: Arrays, meta: dict[str, Any], *, world: World, copy: bool) -> Contents:
    """Return what a checkpoint holds; a copy, where training goes on while it is written."""
    files: dict[str, Arrays] = {name: {} for name in _FILES}
    for name, array in state.arrays.items():
        file, _, key = name.partition(".")
        files[file][key] = np.array(array) if copy else np.asarray(array)
    callbacks, arrays = without_arrays(meta["callbacks"])
    meta = {**meta, "callbacks": callbacks, "adapter": state.meta, "world_size": world.size}
    # History is among it, and grows.
    return Contents(
        {**files, "ranks": kept} | ({_CALLBACKS: arrays} if arrays else {}),
        deepcopy(meta) if copy else meta,
        trained=frozenset(name.removeprefix("model.") for name in state.trained),
    )
