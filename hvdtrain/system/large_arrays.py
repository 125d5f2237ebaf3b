"""Arrays for a short time, whose memory is free again afterwards."""

from __future__ import annotations

import ctypes
import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LARGE_BYTES = 1 << 22


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array with any values. The memory of a large one goes back to the system with it.

    From malloc, arrays of one size each could need new memory: small allocations come to lie where the last one was.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LARGE_BYTES:
        return np.empty(shape, dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # forked processes get a copy
    return np.frombuffer(memory, dtype).reshape(shape)


def give_back_after(num_bytes: int) -> None:
    """Give what malloc keeps back to the system, after an array of this size was freed, if it is a large one.

    Before glibc 2.38, malloc cannot reuse an aligned block for another one of its size: each value that replaces one of
    a framework's would take new memory.
    """
    if num_bytes >= _LARGE_BYTES:
        with suppress(AttributeError, OSError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
