"""JSON for values that JSON alone would change: dicts with keys that are no strings, Counters and tuples."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from hvdtrain.errors import CheckpointError

_TAG = "~type"


def encode(value: Any, where: str) -> Any:
    """Return `value` as JSON from which `decode` restores it; numbers of numpy become Python's.

    Raises:
        CheckpointError: a value of another type; names its place, which begins with `where`.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if type(value) is list:
        return [encode(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if type(value) is tuple:
        return {_TAG: "tuple", "items": encode(list(value), where)}
    if type(value) in (dict, Counter):
        if type(value) is dict and all(type(key) is str and key != _TAG for key in value):
            return {key: encode(each, f"{where}[{key!r}]") for key, each in value.items()}
        items = [[encode(key, where), encode(each, f"{where}[{key!r}]")] for key, each in value.items()]
        return {_TAG: type(value).__name__, "items": items}
    raise CheckpointError(
        "No checkpoint was written: it holds None, bool, int, float, str, list, tuple, dict and Counter. Received: "
        f"{where} of type {type(value).__module__}.{type(value).__qualname__}"
    )


def decode(value: Any) -> Any:
    """Return what `encode` was called on."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(each) for key, each in value.items()}
    items = decode(value["items"])
    return tuple(items) if value[_TAG] == "tuple" else {"dict": dict, "Counter": Counter}[value[_TAG]](dict(items))
