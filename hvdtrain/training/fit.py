"""The parts that the Trainer makes of the arguments of `fit`, for the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdtrain.callbacks.base import CallbackList, CheckpointOptions, RunId
from hvdtrain.data.generators import Generators
from hvdtrain.sync.steps import Steps
from hvdtrain.training.progress import Budget
from hvdtrain.training.validation import Validation

if TYPE_CHECKING:
    from hvdtrain.training.elastic import FitState


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One fit, or one round of it in an elastic job; every rank has the same.

    Attributes:
        run_id: the identity of the run if it is a new one.
        steps: the steps of the training data.
        validation: the validation sets, and when they are due.
        budget: the limits of the run.
        callbacks: the user's, and those of every run.
        checkpoints: the folders in which the run is saved, and when.
        resume: "auto", or "never" to move existing checkpoints away.
        override: settings of the optimizer that a resumed run takes from the script.
        commits: the last commit of an elastic job; None in other jobs.
        notes: log lines on the options, shown after those on what is resumed and on the learning rate.
    """

    run_id: RunId
    steps: Steps
    validation: Validation
    budget: Budget
    callbacks: CallbackList
    checkpoints: Sequence[CheckpointOptions]
    resume: str
    override: Sequence[str]
    commits: FitState | None
    notes: Sequence[str]

    @property
    def saves(self) -> bool:
        """True if the run is saved, so that it may resume."""
        return bool(self.checkpoints) or self.commits is not None

    @property
    def schedules_rate(self) -> bool:
        """True if a callback changes the learning rate."""
        return any(hook.sets_learning_rate for hook in self.callbacks)

    @property
    def generators(self) -> dict[str, Generators]:
        """The random generators that the data hold, by the data's name; "train" is the training data."""
        sets = {f"validation.{name}": each.generators for name, each in self.validation.sets.items()}
        return {"train": self.steps.source.generators} | sets

    @property
    def reads_in_threads(self) -> bool:
        """True if threads of a framework read data."""
        sources = (self.steps.source, *self.validation.sets.values())
        return any(getattr(each, "reads_in_threads", False) for each in sources)
