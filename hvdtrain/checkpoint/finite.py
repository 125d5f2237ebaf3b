"""Whether training can resume from a checkpoint's numbers: found when it is written, kept in its manifest."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

# What must hold no NaN. Running metrics may: the loss of a step that was skipped, for one.
_WHOLE_GROUPS = ("model", "optimizer")
_RANKS, _STATISTICS = "ranks", "mean."


def is_finite(arrays: dict[str, Arrays], trained: frozenset[str]) -> bool:
    """Return whether weights are finite, and no buffer, statistic or optimizer state is NaN.

    Infinity counts in weights alone: masks (-inf) and observed ranges (inf, -inf) hold it by design.

    Args:
        arrays: by group, as `Contents` has them.
        trained: names of weights in the group "model".
    """
    model = arrays.get("model", {})
    if any(name in trained and not _is_bounded(array) for name, array in model.items()):
        return False
    checked = [array for group in _WHOLE_GROUPS for array in arrays.get(group, {}).values()]
    ranks = arrays.get(_RANKS, {}).items()
    checked += [array for name, array in ranks if name.partition("/")[2].startswith(_STATISTICS)]
    return not any(_has_nan(array) for array in checked)


def _is_bounded(array: NDArray[Any]) -> bool:
    if array.dtype.kind != "f" or not array.size:
        return array.dtype.kind != "c" or bool(np.isfinite(array).all())
    # Not isfinite: that takes an array of as many bytes as there are numbers.
    return bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def _has_nan(array: NDArray[Any]) -> bool:
    if array.dtype.kind != "f" or not array.size:
        return array.dtype.kind == "c" and bool(np.isnan(array).any())
    return bool(np.isnan(array.min()))  # which NaN passes through
