"""What ranks exchange at the end of a step: which gradients they have, how many ranks are active, what they weigh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.torch.engine import Average
from hvdtrain.torch.reduce_ops import Reduction

# For each unit, on how many ranks each parameter's gradient is dense, and on how many sparse.
Counts = list[tuple[list[int], list[int]]]


@dataclass
class AllRanks:
    """The flags of all ranks; equal on all of them.

    Attributes:
        active: ranks that have not joined.
        weight: the sum of the ranks' weights; None where none were given.
        counts: None where every rank has the gradients that this one has, and no others.
    """

    active: int
    weight: float | None
    counts: Counts | None


@dataclass
class GradientFlags:
    """Numbers of all ranks, reduced as gradients are; the factors of that reduction are undone here.

    Attributes:
        received: reduced from each rank's 1.0, its weight, and two flags a parameter (`ReductionUnit.flags`).
        how: how they were reduced.
        size: number of ranks, joined or not.
        counts_ranks: False where none can have joined.
    """

    received: Sequence[float]
    how: Reduction
    size: int
    counts_ranks: bool

    def compared_with(self, flags: Sequence[bool], members: Sequence[int], *, weighted: bool) -> AllRanks:
        """Return what is known of all ranks.

        Args:
            flags: this rank's.
            members: how many parameters each unit has.
            weighted: whether ranks gave a weight.
        """
        factor = self.how.prescale_factor * self.how.postscale_factor
        one = factor / self.size if self.how.op == Average else factor  # what a rank adds to a received number
        weight = self.received[1] / one if weighted else None
        # The mean of what all ranks have alike is this one's: so it is in nearly all steps.
        if self.how.op == Average and factor == 1.0 == self.received[0] and self.received[2:] == flags:
            return AllRanks(self.size, weight, None)
        active = round(self.received[0] / one) if self.counts_ranks else self.size
        totals = [round(number / one) for number in self.received[2:]]
        if active == self.size and totals == [self.size * flag for flag in flags]:
            return AllRanks(active, weight, None)
        counts, offset = [], 0
        for count in members:
            end = offset + 2 * count
            counts.append((totals[offset:end:2], totals[offset + 1 : end : 2]))
            offset = end
        return AllRanks(active, weight, counts)
