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
    """Mean seconds per step; arrays of shape (size,), one entry per rank.

    Attributes:
        step: whole steps, from the end of one to the end of the next.
        data: waiting for the next batches.
        train: forward, backward, reduction, update.
        reduction: the part of train that waits for reduced gradients, and so for slower ranks. 0 on one rank. A GPU
            works in the background, so this includes the wait for this rank's backward pass. With
            HVDTRAIN_GPU_ASYNC=1, the GPU's own clock measures all times.
        other: neither data nor train: callbacks and other work between two steps, without waits for other ranks in
            collectives of `trainer.world`.
    """

    step: NDArray[np.float64]
    data: NDArray[np.float64]
    train: NDArray[np.float64]
    reduction: NDArray[np.float64]
    other: NDArray[np.float64]

    @property
    def compute(self) -> NDArray[np.float64]:
        """The time of forward, backward and update."""
        return np.maximum(self.train - self.reduction, 0.0)

    @property
    def own(self) -> NDArray[np.float64]:
        """The time of a step without waits for other ranks: it shows which rank is slow."""
        return self.data + self.compute + self.other


@dataclass(frozen=True)
class Interval:
    """About a second of training, the same on every rank.

    Attributes:
        epoch: from 0.
        step: optimizer steps of the epoch so far.
        global_step: optimizer steps of the run.
        steps: optimizer steps in this interval.
        samples: samples in this interval, over all ranks.
        seconds: length of the interval, on the slowest rank.
        times: each rank's mean times of a step.
        learning_rate: the first parameter group's, after the last step.
        metrics: metrics of the epoch so far, exact over all ranks.
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
        """Samples per second, over all ranks."""
        return self.samples / self.seconds if self.seconds else 0.0


def lower_median(values: NDArray[np.float64]) -> float:
    """Return the median of the ranks' values, the lower one of two: with two ranks, the faster is the reference."""
    return float(np.sort(values)[(len(values) - 1) // 2])
