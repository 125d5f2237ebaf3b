"""How fast an allreduce could be at best: the bytes that every rank must move, over what moves them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import numpy as np

from hvdtrain.bench.launch import BenchError
from hvdtrain.step_times import Spread

# A copy as large as the sweep's largest message: beyond the caches, as gradients are.
COPY_BYTES = 64 << 20
_COPIES = 9
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def moved_bytes(num_bytes: float, ranks: int) -> float:
    """Return 2(N-1)/N * bytes: what each rank must send, and receive, in any allreduce over N ranks."""
    return 2 * (ranks - 1) / ranks * num_bytes


def floor_s(num_bytes: float, *, ranks: int, bytes_per_s: float) -> float:
    """Return the seconds that an allreduce of `num_bytes` takes at least."""
    return moved_bytes(num_bytes, ranks) / bytes_per_s


def parse_link(text: str) -> float:
    """Return the bytes a second of a link such as "25Gb/s" (bits) or "3GB/s" (bytes).

    Raises:
        BenchError: it does not parse, or is not above zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(b|bit|B)(?:/s|ps)\s*", text)
    if match is None or float(match.group(1)) <= 0:
        raise BenchError(
            f"--link must be a speed above zero such as 25Gb/s (bits) or 3GB/s (bytes). Received: --link {text}"
        )
    number, unit, kind = match.groups()
    return float(number) * _UNITS[unit.lower()] / (1 if kind == "B" else 8)


def copy_bandwidth(
    barrier: Callable[[], None], *, num_bytes: int = COPY_BYTES, clock: Callable[[], float] = time.perf_counter
) -> Spread:
    """Measure memory bandwidth: bytes copied a second by this rank, one thread, while all ranks copy at once.

    Args:
        barrier: returns once every rank has called it.
        num_bytes: size of one copy.
        clock: seconds.
    """
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    rates = []
    barrier()
    for _ in range(_COPIES + 1):
        began = clock()
        np.copyto(target, source)
        rates.append(num_bytes / (clock() - began))
    return Spread.of(rates[1:])  # the first one finds its pages
