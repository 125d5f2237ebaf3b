"""Shard sample indices over ranks, by arithmetic: without a framework and without communication.

There is one rule. The samples of an epoch have one order, equal on every rank. Rank r takes every size-th of them, from
position r. It follows that

- all ranks' k-th batches of B samples are together the k-th batch of size * B samples of one process, so gradients
  averaged over ranks equal that process's;
- shard lengths differ by at most one;
- a short last batch is spread over the ranks.

Where ranks take unequal parts (`fit(balance=...)`), `divide` divides the same samples of a step.

The order is not stored: `EpochOrder` computes the sample at a position. A batch costs O(batch) time and a shard O(1)
memory, and an epoch begins at once, for any length of the dataset.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_ROUNDS = 12  # with 8, orders of 5 and 6 samples were not equally likely (twice the expected chi-square)
_BLOCK = 4096  # positions computed at a time, 32 KiB: many batches share numpy's cost per call


class EpochOrder:
    """The order in which all ranks together see the samples of one epoch, computed on demand.

    A shuffled order is a bijection of [0, num_samples) keyed by (seed, epoch): a Feistel network over the digits of
    a number in a mixed base a * b >= num_samples, with addition mod a and mod b in place of xor (Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002). At most a = ceil(sqrt(num_samples)) results are not below
    num_samples; these are permuted again until they are.

    Args:
        num_samples: dataset length, in samples.
        epoch: counts from 0; each epoch has another order.
        seed: must be equal on all ranks.
        shuffle: False keeps the dataset's order.

    Raises:
        ValueError: if num_samples, epoch or seed is negative.
    """

    def __init__(self, num_samples: int, *, epoch: int = 0, seed: int = 0, shuffle: bool = True) -> None:
        for name, value in (("num_samples", num_samples), ("epoch", epoch), ("seed", seed)):
            if value < 0:
                raise ValueError(f"{name} must be >= 0. Received: {name}={value}")
        self._num_samples = num_samples
        self._shuffle = shuffle and num_samples > 1
        if self._shuffle:
            high = math.isqrt(num_samples - 1) + 1
            self._bases = np.uint64(high), np.uint64(-(-num_samples // high))
            # A hash: numpy.random takes 60 ms to import. No random state is read or changed.
            self._keys = np.frombuffer(hashlib.shake_128(b"%d %d" % (seed, epoch)).digest(8 * _ROUNDS), "<u8")

    def __len__(self) -> int:
        return self._num_samples

    def at(self, positions: Indices) -> Indices:
        """Return the sample at each position: int64, of the shape of `positions`, which lie in [0, num_samples)."""
        if not self._shuffle:
            return positions
        samples = self._permute(positions.astype(np.uint64))
        while (outside := np.flatnonzero(samples >= self._num_samples)).size:
            samples[outside] = self._permute(samples[outside])
        return samples.view(np.int64)

    def _permute(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Map [0, a * b) onto itself, one to one."""
        digits, bases = np.divmod(numbers, self._bases[1]), self._bases
        for turn, key in enumerate(self._keys):
            mine, other, base = digits[turn % 2], digits[1 - turn % 2], bases[turn % 2]
            mine += _random_below(base, other, key)
            np.subtract(mine, base, out=mine, where=mine >= base)
        numbers = digits[0] * bases[1]
        numbers += digits[1]
        return numbers


def _random_below(base: np.uint64, numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Return a pseudo-random number in [0, base) for each number, by the finaliser of splitmix64."""
    mixed = numbers ^ key
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    mixed >>= np.uint64(32)
    mixed *= base  # < 2^32 for any dataset below 2^63 samples
    mixed >>= np.uint64(32)
    return mixed


class Shard:
    """A rank's samples of an epoch, in order: a sequence that computes its items on demand."""

    def __init__(self, at: Callable[[Indices], Indices], positions: range) -> None:
        self._at = at  # positions -> samples, such as `EpochOrder(...).at`
        self._positions = positions  # this rank's
        self._block: tuple[int, Indices] = (0, np.zeros(0, np.int64))  # (start, samples), one object because of threads

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, places: slice) -> Indices:
        """Return the samples at `places`, a slice of step 1."""
        first, last, _ = places.indices(len(self))
        start, block = self._block
        if not start <= first <= last <= start + len(block):
            ahead = self._positions[first : max(last, first + _BLOCK)]
            start, block = first, self._at(np.arange(ahead.start, ahead.stop, ahead.step, dtype=np.int64))
            self._block = (start, block)
        return np.array(block[first - start : last - start])  # a copy: a caller may sort it

    def __iter__(self) -> Iterator[int]:
        for first in range(0, len(self), _BLOCK):
            yield from self[first : first + _BLOCK].tolist()


def shard(
    num_samples: int, *, rank: int, size: int, epoch: int = 0, seed: int = 0, shuffle: bool = True, start: int = 0
) -> Shard:
    """Return this rank's samples of one epoch, in O(1) memory; see `shard_indices` for the arguments.

    The first `start` samples of the epoch are done, by any number of ranks; the others are sharded. This costs no time,
    so a resume is free.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, size). Received: rank={rank}, size={size}")
    order = EpochOrder(num_samples, epoch=epoch, seed=seed, shuffle=shuffle)
    return Shard(order.at, range(min(start + rank, num_samples), num_samples, size))


def epoch_order(num_samples: int, *, epoch: int = 0, seed: int = 0, shuffle: bool = True) -> Indices:
    """Return an `EpochOrder` as an array: int64, a permutation of [0, num_samples)."""
    return shard(num_samples, rank=0, size=1, epoch=epoch, seed=seed, shuffle=shuffle)[:]


def shard_indices(
    num_samples: int, *, rank: int, size: int, epoch: int = 0, seed: int = 0, shuffle: bool = True
) -> Indices:
    """Return this rank's sample indices for one epoch, as an array.

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
    return shard(num_samples, rank=rank, size=size, epoch=epoch, seed=seed, shuffle=shuffle)[:]


def steps_per_epoch(num_samples: int, *, batch_size: int, size: int) -> int:
    """Return the number of steps of an epoch, equal on all ranks: also steps without samples for this rank count."""
    return -(-num_samples // (batch_size * size))


def samples_in_step(step: int, num_samples: int, *, batch_size: int, size: int) -> int:
    """Return the number of samples of a step on all ranks: batch_size * size, or fewer in the last step."""
    return max(0, min(batch_size * size, num_samples - step * batch_size * size))


def divide(num_samples: int, shares: Sequence[int]) -> list[int]:
    """Divide a step's samples in proportion to the ranks' shares.

    Returns:
        size + 1 offsets: rank r gets the samples from offset r to offset r + 1. Parts of sum(shares) samples are the
        shares themselves.
    """
    return [num_samples * done // sum(shares) for done in itertools.accumulate([0, *shares])]


def check_batch_size(batch_size: int) -> None:
    """Raise ValueError unless batch_size, in samples per rank, is a whole number >= 1."""
    if not isinstance(batch_size, int | np.integer) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(f"batch_size is samples per rank and must be an int >= 1. Received: batch_size={batch_size!r}")
