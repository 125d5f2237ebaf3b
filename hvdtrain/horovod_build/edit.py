"""One change of Horovod's source, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """Replace `old` by `new` in one file of the sdist, exactly `count` times.

    Attributes:
        path: the file, relative to the sdist's root.
        old: text that must be there, letter for letter.
        new: text that takes its place.
        why: what goes wrong without it.
        count: how often `old` must occur; any other number is an error.
    """

    path: str
    old: str
    new: str
    why: str
    count: int = 1
