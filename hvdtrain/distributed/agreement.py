"""Check that ranks agree on values, and on whether an action failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

from hvdtrain.distributed.world import World
from hvdtrain.errors import DesyncError, OtherRankError


def first_difference(
    lists: Sequence[Sequence[Any]], normal: Callable[[Any], Any] = lambda item: item
) -> tuple[int, int, Any, Any] | None:
    """Return (number of the first list that differs from list 0, index, both items or None); None if none does."""
    for number, other in enumerate(lists):
        for index, (a, b) in enumerate(zip_longest(lists[0], other)):
            if a is None or b is None or normal(a) != normal(b):
                return number, index, a, b
    return None


def require_equal(
    values: dict[str, Any], *, world: World, what: str, advice: str = "Start every rank with the same."
) -> None:
    """Raise DesyncError on every rank unless `values` (JSON values by name) are equal on all ranks."""
    if world.size == 1:
        return
    gathered = world.allgather_object(values, name="agreement")
    for name in dict.fromkeys(key for value in gathered for key in value):
        seen = [value.get(name) for value in gathered]
        others = [rank for rank, value in enumerate(seen) if value != seen[0]]
        if others:
            raise DesyncError(
                f"Ranks disagree on {what}: {name} is {seen[0]!r} on rank 0 but {seen[others[0]]!r} on rank "
                f"{others[0]} ({len(others)} of {world.size} ranks differ). {advice}"
            )


def together(action: Callable[[], Any], *, world: World, name: str) -> Any:
    """Run `action`, which does only I/O, on the root; return its JSON result on every rank, or raise on every rank.

    The root raises the action's own error, the others an OtherRankError that quotes it.
    """
    outcome: dict[str, Any] = {}
    error: Exception | None = None
    if world.is_root:
        try:
            outcome["result"] = action()
        except Exception as caught:  # noqa: BLE001 - the other ranks wait, whatever the error is
            error = caught
            outcome["error"] = f"{type(caught).__name__}: {caught}"
    received = world.broadcast_object(outcome, name=name)  # outside `if is_root`
    if error is not None:
        raise error
    if "error" in received:
        raise OtherRankError(0, received["error"])
    return received["result"]


def raise_on_all(error: Exception | None, *, root_rank: int, broadcast: Callable[[str | None], str | None]) -> None:
    """Raise the root's error, if it has one, and on the other ranks an OtherRankError that quotes it; a collective.

    Args:
        error: this rank's; only the root has one.
        root_rank: the root, among all ranks.
        broadcast: gives the root's text to all ranks that call this.
    """
    text = broadcast(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if text is not None:
        raise OtherRankError(root_rank, text)


@contextmanager
def everywhere(*, world: World, name: str) -> Iterator[None]:
    """Raise on every rank if the block fails on one; its end is a collective.

    A rank whose block failed raises its own error, the others an OtherRankError that quotes the first.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - the other ranks wait, whatever the error is
        error = caught
    text = error and f"{type(error).__name__}: {error}"
    texts = [text] if world.size == 1 else world.allgather_object(text, name=name)
    if error is not None:
        raise error
    for rank, other in enumerate(texts):
        if other is not None:
            raise OtherRankError(rank, other)
