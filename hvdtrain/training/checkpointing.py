"""Save and restore a run: rank 0 does the I/O, and every rank learns the outcome."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain import checkpoint
from hvdtrain.adapter import HostArrays, ShardedArray, State, host_arrays
from hvdtrain.callbacks.base import CheckpointOptions, RunId, with_arrays
from hvdtrain.checkpoint import Contents, Draft, Kind, Writer
from hvdtrain.checkpoint.lock import FolderLock, Holder
from hvdtrain.distributed import agreement, rank_state
from hvdtrain.distributed.launch_environment import count_ranks
from hvdtrain.distributed.rank_state import Arrays
from hvdtrain.distributed.world import World
from hvdtrain.errors import CheckpointError, HvdTrainError
from hvdtrain.sync.synchronizer import Synchronizer
from hvdtrain.system import scratch
from hvdtrain.system.settings import RUN_ID
from hvdtrain.training import learning_rate, packing

log = logging.getLogger("hvdtrain")

_HASHED = "hashed"  # in a checkpoint's meta data: the digests of frozen weights that it leaves out
# How long to wait for an earlier start of this run to end. NFS 4 holds a lost host's locks for 90 s.
_OWN_WRITER_S = 120.0
# The prefix of the names of callbacks' arrays in the broadcast. They are equal on all ranks.
_OF_CALLBACKS = "max.callback."

# The Trainer that last used a folder, by the folder's path: a run of this process must not resume another's.
_users: dict[str, weakref.ref[Synchronizer]] = {}


@dataclass(frozen=True)
class Snapshot:
    """The part of a checkpoint that is not `Adapter.state`."""

    arrays: Arrays  # this rank's own state, named as in `rank_state`
    meta: dict[str, Any]  # the run's progress, history and options, as JSON


class RunCheckpoints:
    """A run's checkpoints in one folder, written in the background.

    Every rank has such an object, and all ranks call it together; rank 0 does the I/O. If the disk does not take a
    checkpoint, rank 0 logs it, and the run continues; `finish` raises on every rank if that was the last one. If a
    write fails for another reason, every rank raises at the next `save` or `wait`: rank 0 the CheckpointError, the
    others an OtherRankError that quotes it.
    """

    def __init__(self, options: CheckpointOptions, world: World) -> None:
        self.options = options
        self.saved_at = 0
        self._store = options.store
        self._world = world
        self._writer = Writer()
        self._lock = FolderLock(options.store.root)

    def claim(self, sync: Synchronizer) -> None:
        """Note that the folder's run is now the one of this Trainer."""
        _users[os.path.realpath(self._store.root)] = weakref.ref(sync)

    def hold(self, run: RunId, *, before: RunId | None) -> None:
        """Lock the folder for this run, until `release`; a collective call.

        `before` is this process's run in the previous round of an elastic job; its writer may not have finished.
        """
        job = os.environ.get(RUN_ID)

        def is_own(other: Holder) -> bool:
            return (job is not None and other.job == job) or (before is not None and other.run == before.id)

        holder = Holder(run.id, run.name, job)
        self._on_root(lambda: self._lock.acquire(holder, is_own=is_own, limit_s=_OWN_WRITER_S), "lock")

    def check_writable(self, sync: Synchronizer, run: RunId) -> None:
        """Check that a checkpoint can be written, before training begins; a collective call."""
        # The first step may create more state. Without it the number is too small, so no large disk is refused.
        state = _state_if_built(sync)

        def check() -> None:
            self._lock.describe(Holder(run.id, run.name, os.environ.get(RUN_ID)))
            left_out = state.frozen & self.options.built.keys()
            own = sum(state.kind(name).nbytes for name in state.arrays if name not in left_out)
            self._store.check_writable(own + sum(each.kind.nbytes for each in state.sharded.values()))

        self._on_root(check, "checkpoint folder")

    def save(self, sync: Synchronizer, snapshot: Snapshot) -> None:
        """Save the current state. Training waits while it is copied, and until the previous one is written."""
        progress, background, built = snapshot.meta["position"], self.options.background, self.options.built
        self.saved_at = progress["global_step"]
        everyones = rank_state.gather(snapshot.arrays, world=self._world)
        state = packing.with_callbacks(_state(sync, self._world), snapshot.meta["callbacks"])
        place = self._store.place(progress["epoch"], progress["step"])

        def begin() -> Draft:
            self._writer.wait()
            copy = background and not state.sharded
            return packing.begin(place, state, everyones, snapshot.meta, world=self._world, copy=copy, built=built)

        def submit(draft: Draft) -> None:
            self._writer.submit(place, draft, then=self._store.prune)
            if not background:
                self._writer.wait()

        packing.write(state, begin, submit, world=self._world)

    def describe_best(self) -> str | None:
        """Return which checkpoint is the best, on the root, if one is."""
        with suppress(CheckpointError, KeyError, OSError):
            return self.options.store.describe_best() if self._world.is_root else None
        return None

    def wait(self) -> None:
        """Return once everything is written; a collective call."""
        self._on_root(self._writer.wait, "save")

    def finish(self) -> None:
        """Return once everything is written, and say which checkpoints the disk has not taken; a collective call.

        Raises:
            CheckpointError: the last checkpoint is one of them. On the other ranks it is an OtherRankError.
        """

        def check() -> None:
            self._writer.wait()
            lost, self._writer.lost = self._writer.lost, []
            if not lost:
                return
            newest = next(iter(self._store.newest_first()), None)
            count = f"{len(lost)} checkpoint{'s were' if len(lost) > 1 else ' was'} not written to {self._store.root}"
            if self._writer.is_last_lost:
                has = "none is there" if newest is None else f"the newest one there is {newest.name}"
                raise CheckpointError(
                    f"{count}, the last one of this run among them; {has}. {lost[-1]} The model in memory has the last "
                    "weights. Free some space and run the same command again, or catch this error and call "
                    "Trainer.save with a folder on another disk."
                )
            log.warning("%s; later ones were. The last error: %s", count, lost[-1])

        self._on_root(check, "save")

    def release(self) -> None:
        """Finish writing and unlock the folder, on this rank alone, however the run ends."""
        try:
            with suppress(Exception):  # already logged; must not hide the error that ended the run
                self._writer.wait()
        finally:
            self._lock.release()

    def set_aside(self) -> None:
        """Move existing checkpoints to a folder from which resume="auto" does not resume."""
        self._on_root(self._store.set_aside, "set aside")

    def restore(self, sync: Synchronizer, *, lr_factor: float) -> Snapshot | None:
        """Load the newest complete checkpoint as `load` does, and warn of each that is skipped; None without one.

        meta["is_others"] is true if another Trainer of this process has used the folder.
        """

        def find() -> tuple[Path, Contents] | None:
            self._store.clear_leftovers()
            found = self._store.newest_whole()
            if found is not None and not found[1].finite:
                finite = self._store.newest_finite()
                afresh = 'fit(resume="never") starts from the beginning.'
                _warn_not_finite(found[0], f"to resume from {finite}, move later ones away." if finite else afresh)
            if found is not None:
                user = _users.get(os.path.realpath(self._store.root))
                found[1].meta["is_others"] = user is not None and user() is not sync
            return found

        return restore(find, sync, lr_factor=lr_factor, world=self._world)

    def _on_root(self, action: Callable[[], None], name: str) -> None:
        agreement.together(action, world=self._world, name=name)


@contextmanager
def held(
    options: Sequence[CheckpointOptions], sync: Synchronizer, run: RunId, *, before: RunId | None, world: World
) -> Iterator[list[RunCheckpoints]]:
    """Lock the folders of checkpoints. However the block ends, finish writing; see `RunCheckpoints.hold`."""
    state = _state_if_built(sync) if options else State()
    for option in options:
        if not option.frozen and not option.built:  # once, before a run resumes: what the script has built
            option.built.update(_digests(state))
    checkpoints = [RunCheckpoints(each, world) for each in options]
    try:
        for each in checkpoints:
            each.hold(run, before=before)
        yield checkpoints
    finally:
        for each in checkpoints:
            each.release()


def _digests(state: State) -> dict[str, str]:
    """Return a digest of each frozen weight; those that are trained now, and perhaps frozen later, have none."""
    return {name: checkpoint.digest(state.arrays[name]) if name in state.frozen else "" for name in state.arrays}


def _state(sync: Synchronizer, world: World) -> State:
    """Return the state, or raise on every rank if one cannot; a collective call."""
    with agreement.everywhere(world=world, name="state"):
        return sync.state()


def _state_if_built(sync: Synchronizer) -> State:
    """Return the state, which is empty while lazy modules have no shapes; a collective call."""
    with suppress(ValueError):  # from a lazy module
        return sync.state()
    return State()


def save(directory: Any, sync: Synchronizer, snapshot: Snapshot, *, world: World) -> None:
    """Write one checkpoint to `directory`; a collective call. HvdTrainError if ranks hold different weights."""
    if not sync.in_sync:
        raise HvdTrainError(
            "save() was called between two synchronizations of sync=..., where each rank holds weights of its own. "
            "Call it where trainer.in_sync is True, as in on_epoch_end. "
            f"Received: directory={directory!r} on rank {world.rank}"
        )
    everyones = rank_state.gather(snapshot.arrays, world=world)
    state = packing.with_callbacks(_state(sync, world), snapshot.meta["callbacks"])

    def begin() -> Draft:
        return packing.begin(scratch.place(directory), state, everyones, snapshot.meta, world=world)

    def finish(draft: Draft) -> None:
        with closing(draft):
            draft.finish()

    packing.write(state, begin, finish, world=world)


def read_config(directory: Any, *, world: World) -> Any:
    """Return the options that the checkpoint's Trainer had."""
    return agreement.together(
        lambda: checkpoint.read_meta(scratch.found(directory))["config"], world=world, name="load"
    )


def load(directory: Any, sync: Synchronizer, *, lr_factor: float, world: World) -> Snapshot | None:
    """Load a checkpoint on the root; `sync.start` gives its state to the others, which need not see the root's disk.

    The Snapshot, with this rank's own state, is to be loaded after everything else.
    """
    return restore(lambda: _read(directory), sync, lr_factor=lr_factor, world=world)


def load_weights(directory: Any, sync: Synchronizer, *, world: World) -> None:
    """Load the weights and buffers of a checkpoint on the root; `sync.start` gives them to the others."""
    now = _state(sync, world)

    def read() -> None:
        place, contents = _read(directory)
        optimizer = host_arrays(now.arrays).only(lambda name: not name.startswith("model."))
        weights = host_arrays(packing.unpack(_with_frozen(place, contents, now)).arrays)
        weights = weights.only(lambda name: name.startswith("model."))
        try:
            sync.load_state(State(optimizer | weights, now.meta, elsewhere=frozenset(now.sharded)))
        except ValueError as error:
            raise CheckpointError(f"Checkpoint {place} is of another model: {error}") from error

    agreement.together(read, world=world, name="load")


def _read(directory: Any) -> tuple[Path, Contents]:
    place = scratch.found(directory)
    contents = checkpoint.scan(place)
    if not contents.finite:
        _warn_not_finite(place, "load an earlier one.")
    return place, contents


def _warn_not_finite(directory: Any, advice: str) -> None:
    log.warning(
        "checkpoint %s will be restored, though it holds NaN or infinity. If that is not meant: %s", directory, advice
    )


def restore(
    find: Callable[[], tuple[Path, Contents] | None], sync: Synchronizer, *, lr_factor: float, world: World
) -> Snapshot | None:
    """Load the checkpoint that `find` returns, with its path, on the root; None if there is none. See `load`."""
    arrays: list[HostArrays] = []
    of_callbacks: list[HostArrays] = []
    found: list[tuple[Path, Contents]] = []

    def look() -> bool | None:
        found.extend(filter(None, [find()]))
        return _HASHED in found[0][1].meta if found else None

    leaves_out = agreement.together(look, world=world, name="find")
    if leaves_out is None:
        return None
    now = _state(sync, world) if leaves_out else State()

    def read() -> dict[str, Any]:
        directory, contents = found.pop()
        meta, contents = contents.meta, _with_frozen(directory, contents, now)
        try:
            sync.load_state(packing.unpack(contents))
        except ValueError as error:
            raise CheckpointError(f"Checkpoint {directory} is of another model: {error}") from error
        del meta["adapter"]
        before = learning_rate.factor(meta["config"]["lr_scaling"], meta["world_size"])
        if before != lr_factor:
            rates = sync.adapter.learning_rates
            sync.adapter.learning_rates = [rate * lr_factor / before for rate in rates]
            written = count_ranks(meta["world_size"])
            log.info("lr %s -> %s (written on %s)", rates, sync.adapter.learning_rates, written)
        meta["restored_from"] = str(directory)
        callbacks = host_arrays(contents.arrays.get(packing.CALLBACKS, {}))
        arrays.append(host_arrays(contents.arrays.get("ranks", {})))
        if world.grid is None:
            arrays[0] |= callbacks.renamed({f"0/{_OF_CALLBACKS}{name}": name for name in callbacks})
        else:
            of_callbacks.append(callbacks)
        return meta

    meta: dict[str, Any] = agreement.together(read, world=world, name="restore")
    held = arrays.pop() if arrays else HostArrays({})
    mine = rank_state.scatter(held, world=world, nbytes=lambda name: held.kind(name).nbytes, take=held.take)
    names = [name for name in mine if name.startswith(_OF_CALLBACKS)]
    theirs: dict[str, Any] = {name.removeprefix(_OF_CALLBACKS): mine.pop(name) for name in names}
    if world.grid is not None:  # a whole model's arrays may be too large for one rank
        theirs = _sent_later(of_callbacks[0] if of_callbacks else HostArrays({}), world)
    return Snapshot(mine, {**meta, "callbacks": with_arrays(meta["callbacks"], theirs)})


def _sent_later(arrays: HostArrays, world: World) -> dict[str, ShardedArray]:
    """Return the root's arrays, each of which it reads and sends when all ranks call `gather`; a collective."""
    kinds = [[name, [*arrays.kind(name).shape], arrays.kind(name).dtype.str] for name in arrays]

    def later(name: str, kind: Kind) -> ShardedArray:
        def gather(everywhere: bool) -> NDArray[Any] | None:
            whole = np.array(arrays[name]) if world.is_root else np.zeros(kind.shape, kind.dtype)
            if everywhere:
                return world.broadcast(whole, name="callbacks.array")
            return whole if world.is_root else None

        return ShardedArray(kind, gather)

    found = world.broadcast_object(kinds, name="callbacks.kinds")
    return {name: later(name, Kind(tuple(shape), np.dtype(dtype))) for name, shape, dtype in found}


def _with_frozen(place: Path, contents: Contents, now: State) -> Contents:
    """Add the frozen weights that a checkpoint leaves out, from the model's; CheckpointError if they are others."""
    added = {}
    for name, expected in contents.meta.pop(_HASHED, {}).items():
        array = now.arrays.get(f"model.{name}")
        if array is None or checkpoint.digest(array) != expected:
            what = "missing" if array is None else "another one"
            raise CheckpointError(
                f"Checkpoint {place} holds no frozen weights, and needs those that it was trained with. Received: a "
                f"model whose {name} is {what}. Build the model with the same pretrained weights, then load it."
            )
        added[name] = array
    return replace(contents, arrays={**contents.arrays, "model": host_arrays(contents.arrays["model"]) | added})
