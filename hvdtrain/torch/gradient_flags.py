"""Exchanged at the end of a step: which gradients ranks have, how many ranks are active, the sum of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.torch.engine import Average
from hvdtrain.torch.reduce_ops import Reduction

# For each unit and parameter: on how many ranks the gradient is dense, and on how many it is sparse.
Counts = list[tuple[list[int], list[int]]]


@dataclass
class GradientFlags:
    """The flags of all ranks; equal on all of them.

    Attributes:
        active: ranks that have not joined.
        weight: the sum of the ranks' weights; None where none were given.
        counts: None if every rank has exactly the gradients of this one.
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
        received: reduced from each rank's 1.0, its weight, and two flags per parameter (`ReductionUnit.flags`).
        flags: this rank's.
        members: how many parameters each unit has.
        how: how the numbers were reduced; this is undone here.
        counts_ranks: False if no rank can have joined.
        weighted: whether ranks gave a weight.
    """
    size = how.process_set.size()
    factor = how.prescale_factor * how.postscale_factor
    one = factor / size if how.op == Average else factor  # what a rank adds to a received number
    weight = received[1] / one if weighted else None
    # In nearly all steps, all ranks have the same flags, so that their mean equals this rank's.
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
