"""What all ranks know of the latest steps: how fast they were, where the time went, and on which rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PARTS = ("compute", "data", "reduction", "other")  # of a step
# What makes up a rank's own time, as sentences name it.
WORDS = {"compute": "computing", "data": "waiting for data", "other": "what it does between steps"}


@dataclass(frozen=True)
class RankTimes:
    """Mean seconds a step; arrays of shape (size,), one entry a rank.

    Attributes:
        step: whole steps, from the end of one to the end of the next.
        data: waiting for the next batches.
        train: forward, backward, reduction, update.
        reduction: in that, waiting for reduced gradients, and so for slower ranks too. 0 on one rank. On a GPU, whose
            work goes on behind Python's, it holds the wait for this rank's own backward pass as well; with
            HVDTRAIN_GPU_ASYNC=1 train and reduction are what the GPU took, by its own clock.
        other: neither data nor train: callbacks of steps and intervals, and what else a rank does between two steps,
            but for waiting for other ranks there in collectives of `trainer.world`.
    """

    step: NDArray[np.float64]
    data: NDArray[np.float64]
    train: NDArray[np.float64]
    reduction: NDArray[np.float64]
    other: NDArray[np.float64]

    @property
    def compute(self) -> NDArray[np.float64]:
        """What the model takes of a step."""
        return np.maximum(self.train - self.reduction, 0.0)

    @property
    def own(self) -> NDArray[np.float64]:
        """What each rank would take for a step by itself: a slow one makes the others wait, and cannot hide here."""
        return self.data + self.compute + self.other


@dataclass(frozen=True)
class Interval:
    """About a second of training, the same on every rank.

    Attributes:
        epoch: from 0.
        step: optimizer steps done of the epoch.
        global_step: in all.
        steps: in this interval.
        samples: trained on in this interval, over all ranks.
        seconds: it took, on the slowest rank.
        times: of the ranks.
        learning_rate: of the first parameter group, after the last step.
        metrics: of the epoch so far, exact over all ranks.
    """

    epoch: int
    step: int
    global_step: int
    steps: int
    samples: int
    seconds: float
    times: RankTimes
    learning_rate: float
    metrics: dict[str, float]

    @property
    def samples_per_s(self) -> float:
        """Over all ranks."""
        return self.samples / self.seconds if self.seconds else 0.0


def lower_median(values: NDArray[np.float64]) -> float:
    """Return the median of the ranks' values, the lower one of two: of two ranks, the faster is the measure."""
    return float(np.sort(values)[(len(values) - 1) // 2])
