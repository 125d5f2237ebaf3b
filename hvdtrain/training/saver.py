"""Save a run in its folders of checkpoints and, in an elastic job, in every rank's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hvdtrain.callbacks.base import CheckpointOptions, RunContext, RunId
from hvdtrain.errors import LostShardError
from hvdtrain.sync.synchronizer import Synchronizer
from hvdtrain.training.checkpointing import RunCheckpoints, Snapshot, held
from hvdtrain.training.due import Due
from hvdtrain.training.fit import Fit

if TYPE_CHECKING:
    from hvdtrain.training.elastic import FitState

log = logging.getLogger("hvdtrain")
_LOST = "the last commit cannot be restored, and the run resumes from the checkpoint %s. %s"


class Saver:
    """Saves the runs of a Trainer; all ranks call its methods together.

    Args:
        context: the run.
        sync: has the state that is saved.
        due: learns which checkpoints are due.
        snapshot: returns what else is saved.

    Attributes:
        folders: the folders of checkpoints of the current or last fit.
    """

    def __init__(self, context: RunContext, sync: Synchronizer, due: Due, snapshot: Callable[[], Snapshot]) -> None:
        self.folders: Sequence[RunCheckpoints] = ()
        self._context, self._sync, self._due, self._snapshot = context, sync, due, snapshot
        self._known: dict[CheckpointOptions, RunCheckpoints] = {}  # the folders, and others to which callbacks save
        self._commits: FitState | None = None  # while a fit of an elastic job runs

    @contextmanager
    def hold(self, fit: Fit, *, before: RunId | None) -> Iterator[None]:
        """Lock the folders of a fit for the block; see `RunCheckpoints.hold`."""
        with held(fit.checkpoints, self._sync, fit.run_id, before=before, world=self._context.world) as self.folders:
            self._commits = fit.commits
            try:
                yield
            finally:
                self._commits = None

    def restore(self, resume: str, *, lr_factor: float) -> Snapshot | None:
        """Load the last commit of an elastic job, else the newest checkpoint, if there is one.

        Raises:
            LostShardError: on every rank, if a part of the last commit is lost, and there is no checkpoint.
        """
        found, lost = None, None
        try:
            found = None if self._commits is None else self._commits.find(lr_factor=lr_factor)
        except LostShardError as error:
            lost = error
        for each in self.folders if found is None else ():
            if resume == "never" and lost is None:  # else the checkpoints there are of this run
                each.set_aside()
            else:
                found = each.restore(self._sync, lr_factor=lr_factor) or found
        if lost is not None:
            if found is None:
                raise lost
            log.warning(_LOST, found.meta["restored_from"], lost)
        return found

    def begin(self, run: RunId, *, global_step: int, will_write: bool) -> None:
        """Begin to save a run at this step, in folders that this rank's disk takes."""
        for each in self.folders:
            self._known[each.options] = each
            each.claim(self._sync)
            each.saved_at = global_step
            if will_write:
                each.check_writable(self._sync, run)

    def save_when_equal(self, options: CheckpointOptions) -> None:
        """Save the current state, once ranks hold equal weights."""
        if options not in self._known:
            self._known[options] = RunCheckpoints(options, self._context.world)
        self._due.add(self._known[options])
        self.save_due()

    def save_due(self) -> None:
        """Save the checkpoints that are due, if ranks hold equal weights."""
        while self._due.checkpoints and self._context.in_sync:
            self.save(self._due.checkpoints[0])

    def save(self, folder: RunCheckpoints) -> None:
        """Save the current state."""
        self._due.saved(folder)
        if self._context.step:  # an epoch's end has its own commit
            self.commit()
        folder.save(self._sync, self._snapshot())

    def save_and_wait(self) -> None:
        """Save the current state to every folder of the fit, and wait until it is written."""
        for each in self.folders:
            self.save(each)
            each.finish()

    def commit(self) -> None:
        """Replace the last commit of an elastic job by the current state."""
        if self._commits is not None:
            self._commits.commit(self._snapshot())

    def finish(self) -> None:
        """Wait until everything is written, also callbacks' own checkpoints; see `RunCheckpoints.finish`."""
        for each in self._known.values():
            each.finish()
