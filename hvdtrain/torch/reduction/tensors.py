"""The tensors with which one rank's optimizer steps, and what is asked of all numbers of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor


class Whole:
    """Whole weights with whole gradients, alike on all ranks: no rank has to ask the others.

    `sharded.Shards` is a subclass, for ranks that step with their parts of them; its methods are collectives.
    """

    are_parts = False  # of weights that each rank has whole
    is_divided = False  # the model: other ranks of the replica have other weights, and wait for this one in each step

    def stepping(self) -> AbstractContextManager[None]:
        """Within it, the optimizer's groups hold the tensors, with their gradients."""
        return nullcontext()

    def are_finite(self, finite: bool) -> bool:
        """Return whether all gradients are finite, if this rank's are."""
        return finite

    def norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients from that of this rank's."""
        return norm

    def add_up(self, number: Tensor) -> None:
        """Replace a number of this rank's tensors by the sum over those of all ranks."""

    def first(self, index: int | None, name_of: Callable[[int], str]) -> str | None:
        """Return the name of the first weight with some quality on any rank; None if no rank has one.

        Args:
            index: of this rank's first such weight; None if it has none.
            name_of: returns the name of this rank's weight of an index.
        """
        return None if index is None else name_of(index)
