"""The steps of a fit: which batches make a step, which function takes it, and how much of the epoch is done then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any, Protocol

from hvdtrain.adapter import Adapter
from hvdtrain.data.sources import NOTHING, Batch, Consumed, Source
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.errors import CheckpointError
from hvdtrain.sync.balance import Balance
from hvdtrain.sync.cutoff import Record
from hvdtrain.telemetry.interval import RankTimes


class Steps(Protocol):
    """The steps of a fit, as many on every rank: `OrdinarySteps`, or those of a `CutoffPlan`."""

    groups: Iterator[Any]  # the steps that are left of the epoch; at its end nothing, or something false

    @property
    def source(self) -> Source:
        """The training data."""

    @property
    def shares(self) -> list[int] | None:
        """Samples of a whole step by rank; None for equal parts."""

    @property
    def was_cut(self) -> bool:
        """True if a rank may be behind after the last step: an action of all ranks should then be postponed."""

    def step_of(self, adapter: Adapter) -> Callable[[Any], None]:
        """Return the adapter's function that takes a step of `groups`."""

    def start(self, consumed: Consumed, *, shares: Sequence[int] | None, record: Record) -> None:
        """Start a fit.

        Args:
            consumed: what is done of the epoch in which the fit begins.
            shares: those of the checkpoint from which it resumes.
            record: the steps of the run that were cut; later ones are added to it.

        Raises:
            CheckpointError: these steps cannot resume there.
        """

    def begin(self, epoch: int, consumed: Consumed, *, number: int) -> None:
        """Draw an epoch's order, and begin to read what is left of it; `number` is that of the next step in the run."""

    def took(self, group: Any) -> Consumed:
        """Count a step; return what is done of the epoch now."""

    def observe(self, times: RankTimes) -> str | None:
        """Learn how long a step took each rank; return a log line if something changes from now on."""

    def divide(self) -> None:
        """Read the rest of the epoch by other shares, if these have changed."""

    def describe(self) -> str | None:
        """Return a log line on the epoch's steps, if there is something to say of them."""

    def close(self) -> None:
        """Read no more of the epoch: its iterator ends what it has started."""


class OrdinarySteps:
    """Steps in which every rank computes its whole part of `accumulate` batches.

    Args:
        source: the training data.
        accumulate: batches of a rank in a step.
        balance: the shares by which ranks divide a step; None for equal parts.
    """

    was_cut = False

    def __init__(self, source: Source, *, ranks: DataRanks, accumulate: int, balance: Balance | None = None) -> None:
        self.source = source
        self.groups: Iterator[list[Batch]] = iter(())
        self._balance, self._size, self._accumulate = balance, ranks.size, accumulate
        self._epoch, self._consumed = 0, NOTHING

    @property
    def shares(self) -> list[int] | None:
        """Samples of a whole step by rank; None for equal parts."""
        return None if self._balance is None else self._balance.shares

    def step_of(self, adapter: Adapter) -> Callable[[Any], None]:
        """Return the adapter's function that takes a list of batches."""
        return adapter.train_step

    def start(self, consumed: Consumed, *, shares: Sequence[int] | None, record: Record) -> None:
        """Start a fit, with the measured shares of the checkpoint if there are any; nothing is added to the record."""
        if consumed.assignment is not None:
            raise CheckpointError(
                "The checkpoint was taken within an epoch with cutoff, where ranks have different samples left. "
                "Received: cutoff=None. Resume with cutoff, or from a checkpoint of an epoch's end."
            )
        if self._balance is not None:
            self._balance.resume(shares)

    def begin(self, epoch: int, consumed: Consumed, *, number: int = 0) -> None:
        """Draw an epoch's order, and begin to read what is left of it."""
        self._epoch, self._consumed = epoch, consumed
        self._read()

    def took(self, group: Sequence[Batch]) -> Consumed:
        """Count a step; return what is done of the epoch now."""
        before, done = self._consumed, group[-1].done
        self._consumed = Consumed(
            before.samples + sum(batch.global_count for batch in group),
            before.batches + self._size * len(group) if done is None else done,
            self._size,
        )
        return self._consumed

    def observe(self, times: RankTimes) -> str | None:
        """Learn how long a step took each rank; return a log line if shares change from now on."""
        return None if self._balance is None else self._balance.observe(times)

    def divide(self) -> None:
        """Read the rest of the epoch by other shares, if these have changed."""
        if self._balance is not None and self._balance.has_changed:
            self._read(rest=True)

    def describe(self) -> None:
        """Return None: there is nothing to say of them."""

    def close(self) -> None:
        """Read no more of the epoch: its iterator ends what it has started."""
        self.groups = iter(())

    def _read(self, *, rest: bool = False) -> None:
        """Read the epoch, or its rest by the present shares."""
        if rest and self._balance is not None:
            batches = self._balance.rest(self._epoch, self._consumed)
        else:
            batches = self.source.epoch(self._epoch, shuffle=True, after=self._consumed)
        # `itertools.batched` of Python 3.12, but lists; at the end they are empty.
        self.groups = map(list, map(islice, repeat(batches), repeat(self._accumulate)))
