"""Find out that ranks have different models before they wait for each other for ever."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch.nn import Parameter

from hvdtrain.errors import DesyncError


def check_agreement(named: Sequence[tuple[str, Parameter]], process_set: Any) -> None:
    """Compare names, shapes and types of parameters over the ranks of `process_set`.

    Raises:
        DesyncError: on every rank, naming the first parameter that differs.
    """
    from hvdtrain.torch.functions import allgather_object

    # Under elastic a new rank builds its model alone, before it meets the others.
    if process_set.included() is False or process_set.size() == 1 or os.environ.get("HOROVOD_ELASTIC") == "1":
        return
    ours = [(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named]
    theirs = allgather_object(ours, process_set=process_set)
    ranks = list(process_set.ranks) if process_set.ranks else list(range(len(theirs)))
    first = theirs[0]
    for rank, described in zip(ranks[1:], theirs[1:], strict=True):
        for i in range(max(len(first), len(described))):
            a = first[i] if i < len(first) else None
            b = described[i] if i < len(described) else None
            if a != b:
                raise DesyncError(
                    f"Ranks have different models. Parameter {i + 1}: rank {ranks[0]} has {_text(a)}, rank {rank} has "
                    f"{_text(b)}. Build the same model, in the same order, on every rank."
                )


def _text(described: tuple[str, tuple[int, ...], str] | None) -> str:
    if described is None:
        return "none"
    name, shape, dtype = described
    return f"{name} of shape {shape} and type {dtype}"
