"""Buckets of what is sent together."""

from __future__ import annotations

from collections.abc import Sequence


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
