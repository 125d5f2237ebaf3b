"""What ranks exchange at the end of a step: which gradients they have, how many ranks are active, what they weigh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.torch.engine import Average
from hvdtrain.torch.reduce_ops import Reduction

# For each unit, on how many ranks each parameter's gradient is dense, and on how many sparse.
Counts = list[tuple[list[int], list[int]]]


@dataclass
class GradientFlags:
    """The flags of all ranks; equal on all of them.

    Attributes:
        active: ranks that have not joined.
        weight: the sum of the ranks' weights; None where none were given.
        counts: None where every rank has the gradients that this one has, and no others.
    """

    active: int
    weight: float | None
    counts: Counts | None


def read(
    received: Sequence[float],
    flags: Sequence[bool],
    members: Sequence[int],
    *,
    how: Reduction,
    counts_ranks: bool,
    weighted: bool,
) -> GradientFlags:
    """Return the flags of all ranks, from numbers that were reduced as gradients are.

    Args:
        received: reduced from each rank's 1.0, its weight, and two flags a parameter (`ReductionUnit.flags`).
        flags: this rank's.
        members: how many parameters each unit has.
        how: how the numbers were reduced, which is undone here.
        counts_ranks: False where no rank can have joined.
        weighted: whether ranks gave a weight.
    """
    size = how.process_set.size()
    factor = how.prescale_factor * how.postscale_factor
    one = factor / size if how.op == Average else factor  # what a rank adds to a received number
    weight = received[1] / one if weighted else None
    # The mean of what all ranks have alike is this one's: so it is in nearly all steps.
    if how.op == Average and factor == 1.0 == received[0] and received[2:] == flags:
        return GradientFlags(size, weight, None)
    active = round(received[0] / one) if counts_ranks else size
    totals = [round(number / one) for number in received[2:]]
    if active == size and totals == [size * flag for flag in flags]:
        return GradientFlags(active, weight, None)
    counts, offset = [], 0
    for count in members:
        end = offset + 2 * count
        counts.append((totals[offset:end:2], totals[offset + 1 : end : 2]))
        offset = end
    return GradientFlags(active, weight, counts)
