"""Steps that close before every rank is done: the others send what they have, and compute the rest in later steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapter import Adapter, Needs, OpenStep
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.sources import Batch, Consumed, Source, as_divisible
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.telemetry.interval import RankTimes

log = logging.getLogger("hvdtrain")

NEEDS = Needs("cutoff", "ranks contribute different batches to a step", ("open steps",))
Record = dict[int, list[int]]  # for each step that was cut, by its number in the run: batches by rank

# What needs all ranks is postponed to a step without a cut. If so many steps in a row were cut, ranks wait instead.
_MOST_CUT_IN_A_ROW = 10
_ROUNDING = 1e-9  # 0.9 * 10 is 9 ranks


def check_cutoff(given: Any) -> float | Record | None:
    """Return the Trainer's cutoff: a share of the ranks, or the record of a run; ValueError unless it is one."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        with suppress(TypeError, ValueError):
            record = {int(step): [int(count) for count in counts] for step, counts in given.items()}
            if all(counts and min(counts) >= 0 and step >= 0 for step, counts in record.items()):
                return record
    elif not isinstance(given, bool) and isinstance(given, int | float) and 0 < given <= 1:
        return float(given)
    raise ValueError(
        "cutoff must be a share of the ranks, in (0, 1], or `history.cutoffs` of an earlier run. "
        f"Received: cutoff={given!r}"
    )


class CutoffPlan:
    """Plans the steps of an epoch: how many batches each rank is to compute.

    The plan is equal on all ranks, because they learn after each step what every rank has contributed. A rank reads its
    own part of the epoch batch by batch. A batch that it did not contribute to a step is the first of its next step. If
    ranks have taken different numbers of samples, and one has too few left for a whole step, all samples that are left
    are assigned again. So each sample is used once in an epoch.

    Args:
        given: the share of the ranks that closes a step, or the record of a run, whose steps are repeated.
        source: the training data.
        accumulate: batches of a rank in a whole step.

    Attributes:
        groups: the steps that are left of the epoch.
        record: steps of the run that were cut.

    Raises:
        TypeError: the data can only be iterated.
        ValueError: the record is of another number of ranks, or of more batches.
    """

    shares = None  # of a step's samples: ranks take as many batches as they can

    def __init__(self, given: float | Record, source: Source, *, ranks: DataRanks, accumulate: int) -> None:
        self.groups: Iterator[OpenStep] = iter(())
        self.record: Record = {}
        self._share = given if isinstance(given, float) else 1.0
        self._replayed: Record = {} if isinstance(given, float) else given
        self.source = as_divisible(source, need="cutoff gives samples that were cut off to other ranks.")
        self._ranks, self._accumulate = ranks, accumulate
        self._num_samples = int(source.facts["number of samples"])
        self._batch_size = int(source.facts["batch_size"])
        self._cut_in_a_row = self._steps = self._steps_cut = self._batches_cut = 0
        self._epoch = self._number = 0
        self._assignment, self._consumed = Assignment((0,) * ranks.size), Consumed()
        self._batches = _Ahead(iter(()))
        if isinstance(given, float) and self._needed(ranks.size) == ranks.size > 1 and ranks.world.is_root:
            log.warning(
                "cutoff=%s of %d ranks waits for all of them: no step is cut. Give at most %s.",
                given, ranks.size, math.floor(100 * (ranks.size - 1) / ranks.size) / 100,
            )  # fmt: skip
        for step, counts in self._replayed.items():
            if len(counts) != ranks.size or max(counts) > accumulate:
                raise ValueError(
                    f"cutoff's record must be of {ranks.size} ranks and at most accumulate={accumulate} batches each. "
                    f"Received: {counts} in step {step}"
                )

    @property
    def was_cut(self) -> bool:
        """True if a rank may be behind after the last step; False after many such steps in a row."""
        return 0 < self._cut_in_a_row < _MOST_CUT_IN_A_ROW

    def step_of(self, adapter: Adapter) -> Callable[[OpenStep], None]:
        """Return the adapter's function that takes an `OpenStep`."""
        return adapter.open_step

    def start(self, consumed: Consumed, *, shares: Sequence[int] | None, record: Record) -> None:
        """Start a fit, and add its steps that are cut to the record; a run may resume anywhere."""
        self.record = record

    def begin(self, epoch: int, consumed: Consumed, *, number: int) -> None:
        """Draw an epoch's order, and begin to read what is left of it; `number` is that of the next step in the run."""
        size = self._ranks.size
        self._cut_in_a_row = self._steps = self._steps_cut = self._batches_cut = 0
        assignment = consumed.assignment
        if assignment is None:
            assignment = Assignment((0,) * size, start=consumed.samples)
        elif assignment.size != size:
            assignment = assignment.reassign(self._num_samples, size=size)
        self._epoch, self._number = epoch, number
        self._assignment, self._consumed = assignment, replace(consumed, size=size, assignment=assignment)
        self._read(self.source.epoch(epoch, shuffle=True, after=self._consumed))
        self.groups = iter(self._next, None)

    def took(self, group: OpenStep) -> Consumed:
        """Count what ranks have contributed to a step, and record it if something was cut; return what is done now."""
        counts = group.counts
        assert counts is not None
        samples = np.minimum(counts * self._batch_size, self._assignment.remaining(self._num_samples)).tolist()
        lacking = int((group.whole - counts).sum())
        self._steps += 1
        self._cut_in_a_row = self._cut_in_a_row + 1 if lacking else 0
        if lacking:
            self.record[self._number] = counts.tolist()
            self._steps_cut += 1
            self._batches_cut += lacking
        self._number += 1
        done = self._consumed
        self._assignment = self._assignment.take(samples)
        self._consumed = replace(
            done,
            samples=done.samples + sum(samples),
            batches=done.batches + int(counts.sum()),
            assignment=self._assignment,
        )
        return self._consumed

    def observe(self, times: RankTimes) -> None:
        """Return None: speeds change nothing."""

    def divide(self) -> None:
        """Do nothing: what is left is assigned again when a step needs it."""

    def describe(self) -> str | None:
        """Return a log line on the steps of the epoch that were cut; None if there were none."""
        if not self._steps_cut:
            return None
        return (
            f"cutoff: {self._steps_cut} of {self._steps} steps were closed before all ranks were done; "
            f"{self._batches_cut} batches were computed in later steps instead"
        )

    def close(self) -> None:
        """End the workers of a DataLoader: at an epoch's end, a rank does not ask it for more than it takes."""
        self.groups = iter(())
        self._batches.close()

    def _next(self) -> OpenStep | None:
        """Return the next step; None at the epoch's end.

        Raises:
            ValueError: ranks have fewer batches left than the record says.
        """
        left = self._batches_left()
        if len(set(self._assignment.taken)) > 1 and left.any() and left.min() < self._accumulate:
            self._assignment = self._assignment.reassign(self._num_samples, size=self._ranks.size)
            self._read(self.source.rest(self._epoch, replace(self._consumed, assignment=self._assignment)))
            left = self._batches_left()
        whole = np.minimum(left, self._accumulate)
        if not whole.any():
            return None
        planned = np.array(self._replayed.get(self._number, whole), np.int64)
        if (planned > whole).any() or not planned.any():
            raise ValueError(
                f"cutoff's record is of a run with other data, batch_size or accumulate. Received: {planned.tolist()} "
                f"batches in step {self._number}, where ranks have {whole.tolist()} left."
            )
        samples = int(np.minimum(whole * self._batch_size, self._assignment.remaining(self._num_samples)).sum())
        needed = self._needed(int(np.count_nonzero(planned)))
        return OpenStep(planned, whole, samples, needed, self._batches.peek, self._batches.advance)

    def _read(self, batches: Iterator[Batch]) -> None:
        """Read this rank's batches from here."""
        self._batches.close()
        self._batches = _Ahead(batches)

    def _needed(self, ranks: int) -> int:
        """Return how many of these ranks must be done for a step to close."""
        return max(1, math.ceil(self._share * ranks - _ROUNDING))

    def _batches_left(self) -> NDArray[np.int64]:
        left: NDArray[np.int64] = -(-self._assignment.remaining(self._num_samples) // self._batch_size)
        return left


class _Ahead:
    """An iterator whose next item can be read before it is taken."""

    def __init__(self, items: Iterator[Batch]) -> None:
        self._items = items
        self._next: list[Batch] = []

    def peek(self) -> Batch:
        """Return the next item, the same one until `advance`."""
        if not self._next:
            self._next = [next(self._items)]
        return self._next[0]

    def advance(self) -> None:
        """Take that item."""
        self._next = []

    def close(self) -> None:
        """Let go of the iterator, which ends what it has started."""
        self._items, self._next = iter(()), []
