"""Arrays in the types that safetensors has, which lacks complex128."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MARK = "@complex128"  # at the end of a name: pairs of float64, on one more axis


def encoded(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays for safetensors, which ignores strides and takes them as in C."""
    found = {}
    for name, array in arrays.items():
        plain = np.asarray(array, order="C")
        is_pair = plain.dtype == np.complex128
        found[f"{name}{_MARK}" if is_pair else name] = plain[..., np.newaxis].view(np.float64) if is_pair else plain
    return found


def decoded(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return what `encoded` was given."""
    return {
        name.removesuffix(_MARK): array.view(np.complex128)[..., 0] if name.endswith(_MARK) else array
        for name, array in arrays.items()
    }
