"""The end of a run: all ranks decide it together."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from hvdtrain.distributed.world import World
from hvdtrain.telemetry.interval import HeartbeatReport
from hvdtrain.training import preemption
from hvdtrain.training.progress import Budget
from hvdtrain.training.run_state import RunState


class RunEnd:
    """Decides whether a run takes a further step.

    Attributes:
        why: the reason why the run takes no further step, equal on all ranks; None while it takes steps.
        limit_s: the training time after which the run ends; infinite without such a limit.
    """

    def __init__(self, budget: Budget, state: RunState, world: World) -> None:
        self.why: Literal["budget", "callback", "signal", "nan_policy"] | None = None
        self.limit_s = math.inf if budget.seconds is None else budget.seconds
        self._budget, self._state, self._world = budget, state, world
        self._is_requested = self._within_epoch = False  # by a callback on this rank

    def request(self, *, within_epoch: bool) -> None:
        """Note that a callback on this rank ends the run."""
        self._is_requested = True
        self._within_epoch |= within_epoch

    @property
    def is_spent(self) -> bool:
        """True if the run has come to one of the limits."""
        progress = self._state.progress
        return self._budget.is_spent(progress, seconds=self._state.history.seconds + progress.seconds)

    @property
    def is_over(self) -> bool:
        """True if a run that resumes had come to its end, and has nothing left to take or to report."""
        return self.is_spent and (not self._state.progress.step or self._state.part is not None)

    def check_budget(self) -> None:
        """End the run if it has come to one of the limits."""
        if self.is_spent:
            self.why = "budget"

    def by_nan_policy(self) -> None:
        """End the run because a step was refused: its last epoch is not reported."""
        self.why = "nan_policy"

    def agree(self, *, heed_signals: bool = True) -> None:
        """End the run if a callback on any rank has requested it, or a signal to any rank; a collective."""
        signal = heed_signals and preemption.requested() is not None
        flags = np.array([self._is_requested, signal], np.int32)
        by_callback, by_signal = self._world.allreduce(flags, "max", name="stop")
        if by_callback or by_signal:
            self.why = "signal" if by_signal else "callback"

    def spent_s(self, seconds: float) -> float:
        """Return what this rank reports in a heartbeat after so many seconds of the epoch.

        A callback that ends the run within the epoch reports infinity. All ranks learn the largest of their reports, so
        all end after the same step.
        """
        return math.inf if self._within_epoch else self._state.history.seconds + seconds

    def learn(self, report: HeartbeatReport) -> None:
        """End the run if the time of any rank is spent, or a callback on any rank ends it within the epoch."""
        if report.spent_s >= self.limit_s:
            self.why = "callback" if math.isinf(report.spent_s) else "budget"
