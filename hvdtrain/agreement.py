"""What must be equal on all ranks, checked and named: a difference that goes unnoticed is a wrong number or a hang."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from hvdtrain.adapter import State
from hvdtrain.errors import DesyncError, HvdTrainError
from hvdtrain.world import World


def require_equal(values: dict[str, Any], *, world: World, what: str) -> None:
    """Raise DesyncError on every rank unless `values` (JSON values by name) are equal on all of them."""
    if world.size == 1:
        return
    gathered = world.allgather_object(values, name="agreement")
    for name in sorted({key for value in gathered for key in value}):
        seen = [value.get(name) for value in gathered]
        others = [rank for rank, value in enumerate(seen) if value != seen[0]]
        if others:
            raise DesyncError(
                f"Ranks disagree on {what}: {name} is {seen[0]!r} on rank 0 but {seen[others[0]]!r} on rank "
                f"{others[0]} ({len(others)} of {world.size} ranks differ). Start every rank with the same."
            )


def require_equal_state(state: State, *, world: World) -> None:
    """Raise DesyncError naming the first tensor that is not bitwise equal on all ranks."""
    hashes = {name: zlib.crc32(np.asarray(array, order="C").tobytes()) for name, array in state.arrays.items()}
    require_equal(hashes, world=world, what="the trained weights (crc32)")


def together(action: Any, *, world: World, name: str) -> Any:
    """Run `action` on the root and return its JSON result on every rank; if it fails, every rank raises.

    The action does I/O only; the exchange of its outcome is the collective, outside `if is_root`.

    Raises:
        HvdTrainError: the root's own error, on the root; one that quotes it, on the others.
    """
    outcome: dict[str, Any] = {}
    error: HvdTrainError | None = None
    if world.is_root:
        try:
            outcome["result"] = action()
        except HvdTrainError as caught:
            error = caught
            outcome["error"] = str(caught)
    received = world.broadcast_object(outcome, name=name)
    if error is not None:
        raise error
    if "error" in received:
        raise HvdTrainError(f"On rank 0: {received['error']}")
    return received["result"]
