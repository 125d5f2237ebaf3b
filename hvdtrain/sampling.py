"""Which rank sees which sample: pure index arithmetic, no framework and no communication.

One rule gives everything else. The samples of an epoch stand in one order, the same on every rank; rank r takes
every size-th of them, from position r. Then the union of all ranks' k-th batches of B samples is the k-th batch of
size * B samples of a single process, so gradients averaged over ranks equal that process's; shard lengths differ by at
most one; and a short last batch is spread over the ranks instead of landing on one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def epoch_order(num_samples: int, *, epoch: int = 0, seed: int = 0, shuffle: bool = True) -> Indices:
    """Return the order in which all ranks together see the samples of one epoch.

    Args:
        num_samples: dataset length, in samples.
        epoch: counts from 0; each has an order of its own.
        seed: must be equal on all ranks.
        shuffle: False keeps the dataset's order.

    Returns:
        int64 array, a permutation of [0, num_samples).

    Raises:
        ValueError: if num_samples, epoch or seed is negative.
    """
    for name, value in (("num_samples", num_samples), ("epoch", epoch), ("seed", seed)):
        if value < 0:
            raise ValueError(f"{name} must be >= 0. Received: {name}={value}")
    if not shuffle:
        return np.arange(num_samples, dtype=np.int64)
    # A generator of its own, keyed by (seed, epoch): nobody's global random state is read or changed.
    return np.random.default_rng((seed, epoch)).permutation(num_samples)


def shard_indices(
    num_samples: int, *, rank: int, size: int, epoch: int = 0, seed: int = 0, shuffle: bool = True
) -> Indices:
    """Return this rank's sample indices for one epoch.

    Every index in [0, num_samples) belongs to exactly one rank; shard lengths differ by at most one.

    Args:
        num_samples: dataset length, in samples.
        rank: this process's number, in [0, size).
        size: number of ranks.
        epoch: counts from 0.
        seed: order of the shuffle; must be equal on all ranks.
        shuffle: False keeps the dataset's order.

    Returns:
        int64 array, shape (ceil or floor of num_samples / size,).

    Raises:
        ValueError: if rank is not in [0, size), or num_samples, epoch or seed is negative.
    """
    check_rank(rank, size)
    return epoch_order(num_samples, epoch=epoch, seed=seed, shuffle=shuffle)[rank::size]


def steps_per_epoch(num_samples: int, *, batch_size: int, size: int) -> int:
    """Return how many steps every rank takes in an epoch, those with nothing left for this rank included.

    Args:
        num_samples: dataset length, in samples.
        batch_size: samples a rank takes in a full step.
        size: number of ranks.

    Raises:
        ValueError: if batch_size < 1 or size < 1.
    """
    check_batch_size(batch_size)
    check_rank(0, size)
    return -(-num_samples // (batch_size * size))


def samples_in_step(step: int, num_samples: int, *, batch_size: int, size: int) -> int:
    """Return how many samples all ranks hold together in a step: batch_size * size, or what the tail has."""
    return max(0, min(batch_size * size, num_samples - step * batch_size * size))


def check_batch_size(batch_size: int) -> None:
    """Raise ValueError unless batch_size, in samples a rank, is a whole number >= 1."""
    if not isinstance(batch_size, int | np.integer) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(f"batch_size is samples per rank and must be an int >= 1. Received: batch_size={batch_size!r}")


def check_rank(rank: int, size: int) -> None:
    """Raise ValueError unless rank is in [0, size)."""
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, size). Received: rank={rank}, size={size}")
