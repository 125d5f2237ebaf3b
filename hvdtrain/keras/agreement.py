"""Check once that all ranks hold the same model: a difference is an error with a name, not a hang."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.distributed import world
from hvdtrain.distributed.agreement import first_difference
from hvdtrain.errors import DesyncError
from hvdtrain.keras import ops

Described = list[Any]  # [path, shape, dtype]


def path(variable: Any) -> str:
    """Return a variable's path, or its name where it is not Keras's own."""
    return str(getattr(variable, "path", getattr(variable, "name", "variable")))


def without_counters(name: str) -> str:
    """Return `name` without the numbers that Keras counts up ("dense_3/kernel"): ranks may have counted differently."""
    return re.sub(r"_\d+(?=/|$|\.)", "", name)


def agree(variables: Sequence[Any], *, what: str, offer: int = 0, process_set: Any | None = None) -> int:
    """Return the greatest `offer` of all ranks, once they are known to hold equal variables; a collective.

    Variables are compared in order by path, shape and dtype, never by value. Nothing is sent but a digest, unless ranks
    differ.

    Raises:
        DesyncError: on every rank, naming the first variable that differs.
    """

    def gather(array: Any, name: str) -> Any:
        return ops.call("allgather", array, name=f"hvdtrain.{name}", process_set=process_set)

    mine = [[path(v), [int(n) for n in v.shape], str(keras.backend.standardize_dtype(v.dtype))] for v in variables]
    digest = hashlib.sha256(json.dumps([_normal(each) for each in mine]).encode()).digest()
    rows = gather(np.frombuffer(digest + offer.to_bytes(8, "little"), np.uint8).reshape(1, -1), "agree")
    if (rows[:, :32] == rows[0, :32]).all():
        return max(int.from_bytes(row[32:].tobytes(), "little") for row in rows)
    data = np.frombuffer(json.dumps(mine).encode(), np.uint8)
    sizes = gather(np.array([data.size]), "disagree.length")
    parts = np.split(gather(data, "disagree.bytes"), np.cumsum(sizes)[:-1])
    ranks = [json.loads(part.tobytes()) for part in parts]
    number, index, a, b = first_difference(ranks, _normal) or (0, 0, None, None)
    raise DesyncError(
        f"Ranks hold different {what}: variable {index} is {_text(a)} on the first rank and {_text(b)} on rank number "
        f"{number} of the set (seen from rank {world.current().rank}). Build the same model on every rank."
    )


def _normal(described: Described) -> Described:
    return [without_counters(described[0]), *described[1:]]


def _text(described: Described | None) -> str:
    return "absent" if described is None else f"{described[0]} of shape {tuple(described[1])}, {described[2]}"
