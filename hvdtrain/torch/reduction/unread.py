"""Tensors that are still where they come from, such as a checkpoint's file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdtrain.system import large_arrays


@dataclass(frozen=True)
class Unread:
    """A tensor of this shape and type, on the host; `read` returns it, and nothing keeps it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor on the host with any values, for a short time; see `large_arrays`."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(large_arrays.empty((num_bytes,), np.dtype(np.uint8))).view(dtype).view(shape)


def as_read(value: Any) -> Any:
    """Return a tensor that is read, or any other value as it is."""
    return value.read() if isinstance(value, Unread) else value
