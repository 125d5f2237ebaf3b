"""Arrays in the types that safetensors has, which lacks complex128."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MARK = "@complex128"  # at the end of a name: pairs of float64, on one more axis


def encoded_kind(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[str, tuple[int, ...], np.dtype[Any]]:
    """Return the name, shape and type that `encoded` gives an array of this name, shape and type."""
    if dtype == np.complex128:
        return f"{name}{_MARK}", (*shape, 2), np.dtype(np.float64)
    return name, shape, dtype


def decoded_kind(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[str, tuple[int, ...], np.dtype[Any]]:
    """Return what `encoded_kind` was given; ValueError for pairs of another shape or type."""
    if not name.endswith(_MARK):
        return name, shape, dtype
    if dtype != np.float64 or shape[-1:] != (2,):
        raise ValueError(f"{name} is of type {dtype} and shape {shape}")
    return name.removesuffix(_MARK), shape[:-1], np.dtype(np.complex128)


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
