"""Buckets of what is sent together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The sizes, in bytes, by which gradients on a kind of device are sent together or alone."""

    alone: int  # a gradient of this size or more is sent alone, and so not copied
    bucket: int  # the largest bucket
    last: int  # the bucket that backward makes last, for which all ranks wait
    tiny: int  # a model up to this size uses one bucket: another negotiation would cost more than it hides


# Below `alone`, copying a gradient is cheaper than sending it: on a host, two passes through the cache against 20 us of
# Python and a negotiation. Over NCCL an operation takes about as long for 1 MiB as for a number, and only from 8 MiB on
# reaches most of the links' speed: published figures, which no GPU has confirmed here.
ON_HOST = Limits(alone=2**18, bucket=2**20, last=2**15, tiny=2**19)
ON_GPU = Limits(alone=2**23, bucket=25 * 2**20, last=2**20, tiny=2**20)


def fill_in_order(nbytes: Sequence[int], most_bytes: int) -> list[list[int]]:
    """Return positions, one after the other, in buckets of at most so many bytes; a larger item has its own.

    Args:
        nbytes: the size of each item.
        most_bytes: of a bucket.
    """
    buckets: list[list[int]] = []
    room = 0
    for position, size in enumerate(nbytes):
        if not buckets or size > room:
            buckets.append([])
            room = most_bytes
        buckets[-1].append(position)
        room -= size
    return buckets
