"""How fast an allreduce could be at best: the bytes that every rank must move, over what moves them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from hvdtrain.telemetry.step_times import Spread
from hvdtrain.tools.bench.launch import BenchUsageError
from hvdtrain.tools.quantities import parse_rate

# Below this, a copy's time is the call's.
MIN_COPY_BYTES = 64 << 10
_MIN_COPIES = 10
# Long beside the moment in which ranks leave a barrier, so that they do copy at once.
_COPY_S = 0.03


def moved_bytes(num_bytes: float, ranks: int) -> float:
    """Return 2(N-1)/N * bytes: what each rank must send, and receive, in any allreduce over N ranks."""
    return 2 * (ranks - 1) / ranks * num_bytes


def floor_s(num_bytes: float, *, ranks: int, bytes_per_s: float) -> float:
    """Return the seconds that an allreduce of `num_bytes` takes at least."""
    return moved_bytes(num_bytes, ranks) / bytes_per_s


def parse_link(text: str) -> float:
    """Return the bytes a second of a link such as "25Gb/s" (bits) or "3GB/s" (bytes).

    Raises:
        BenchUsageError: it does not parse, or is not above zero and finite.
    """
    try:
        rate = parse_rate(text)
    except ValueError as problem:
        raise BenchUsageError(f"--link: {problem}") from None
    if not 0 < rate < math.inf:
        raise BenchUsageError(f"--link must be above zero and finite. Received: --link {text}")
    return rate


def copy_bandwidth(
    barrier: Callable[[], None], *, num_bytes: int, clock: Callable[[], float] = time.perf_counter
) -> Spread:
    """Measure memory bandwidth: bytes copied a second by this rank, one thread, while all ranks copy at once.

    Args:
        barrier: returns once every rank has called it.
        num_bytes: size of one copy. As large as the message that it is compared with: caches serve both alike.
        clock: seconds.
    """
    num_bytes = max(num_bytes, MIN_COPY_BYTES)
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    rates: list[float] = []
    barrier()
    first = clock()
    while len(rates) < _MIN_COPIES or clock() - first < _COPY_S:
        began = clock()
        np.copyto(target, source)
        rates.append(num_bytes / (clock() - began))
    return Spread.of(rates[1:])  # the first one finds its pages
