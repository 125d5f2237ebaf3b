"""A digest of an array, at a good part of the speed at which memory is read.

An array's bytes are read as 64-bit words, in blocks of 512 * 511. The words of a block are added up, with wrap-around,
into 512 lanes (a word's place modulo 512) and into 511 lanes (its place modulo 511); blake2b hashes the lanes of all
blocks in order, what is left over, and the array's dtype and shape. 512 and 511 have no common factor, so two words of
a block share at most one of their two lanes: any change of one word or of two is found, also two that would cancel in
a plain sum. A change of three words or more is missed only if it leaves all lanes of a block equal: by chance once in
2^64. This is a guard against faults, not against forgery.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import World

SIZE = 16  # bytes of a digest
LANES = (512, 511)
BLOCK = LANES[0] * LANES[1]  # words; 2 MiB, so that the second sum reads from the cache
_SMALL = 2048  # words; hashing them costs less than hashing their lanes


def of_array(array: NDArray[Any]) -> bytes:
    """Return the digest of an array's bits, dtype and shape: 0.0 and -0.0 differ, and so do two NaNs' payloads."""
    data = np.asarray(array, order="C").reshape(-1).view(np.uint8)
    return of_parts(f"{array.dtype.str}{array.shape}", b"", data)


def of_parts(kind: str, sums: bytes | memoryview, data: NDArray[np.uint8]) -> bytes:
    """Return the digest of an array whose first blocks are already summed up.

    Args:
        kind: the array's type and shape.
        sums: 64-bit words: for each of these blocks its sums in `LANES[0]` lanes, then those in `LANES[1]`.
        data: the array's other bytes, shape (bytes,).
    """
    hashed = hashlib.blake2b(kind.encode(), digest_size=SIZE)
    hashed.update(sums)
    whole = data.size // 8 * 8
    words = data[:whole].view(np.uint64)
    for begin in range(0, words.size, BLOCK):
        block = words[begin : begin + BLOCK]
        rest = 0  # the words at the block's end that fill no row of lanes are hashed as they are
        if block.size > _SMALL:
            rest = min(block.size // lanes * lanes for lanes in LANES)
            for lanes in LANES:
                rows = block[: block.size // lanes * lanes].reshape(-1, lanes)
                hashed.update(np.add.reduce(rows, axis=0).data)
        hashed.update(block[rest:].data)
    hashed.update(data[whole:].data)
    return hashed.digest()


def equal_on_ranks(arrays: Iterable[NDArray[Any]], *, ranks: World | DataRanks, name: str) -> NDArray[np.bool_]:
    """Return for each array whether it is equal on all ranks, bit for bit; a collective, named `name`.

    Ranks give as many arrays, in one order.
    """
    mine = np.frombuffer(b"".join(map(of_array, arrays)), np.int64)
    # The largest of the complements is that of the smallest.
    largest, smallest = np.split(ranks.allreduce(np.concatenate([mine, ~mine]), "max", name=name), 2)
    same: NDArray[np.bool_] = (largest == ~smallest).reshape(-1, SIZE // mine.itemsize).all(axis=1)
    return same


def of_json(value: Any) -> bytes:
    """Return the digest of a JSON value; of anything else in it only the type counts, since its text may be unique."""
    text = json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
    return hashlib.blake2b(text.encode(), digest_size=SIZE).digest()


def combined(digests: Mapping[str, bytes]) -> bytes:
    """Return one digest of many, their names and their order."""
    return of_json([[name, digest.hex()] for name, digest in digests.items()])
