"""Take what a launcher prints apart into whole lines, each with the rank that printed it."""

from __future__ import annotations

import re
from collections import deque

# What stands before each piece of a rank's output: "[1,0]<stdout>:" over MPI, "[0]<stdout>:" over Gloo.
_MARK = re.compile(rb"\[(?:\d+,)?(\d+)\]<(?:stdout|stderr)>:?")
_TAIL_LINES = 15

Line = tuple[int | None, str]


class Lines:
    """One stream of a launcher's output, as it comes in pieces.

    Attributes:
        tails: rank -> its last lines; None stands for the launcher itself.
    """

    def __init__(self) -> None:
        self.tails: dict[int | None, deque[str]] = {}
        self._raw = b""
        self._begun: dict[int, bytes] = {}

    def feed(self, data: bytes) -> list[Line]:
        """Return the lines that `data` completes, as (rank, text); the launcher's own have rank None."""
        *whole, self._raw = (self._raw + data).split(b"\n")
        return [self._line(rank, text) for raw in whole for rank, text in self._assign(raw)]

    def end(self) -> list[Line]:
        """Return what was left without an end of its line."""
        rest = self.feed(b"\n") if self._raw else []
        begun, self._begun = self._begun, {}
        return [*rest, *(self._line(rank, text) for rank, text in begun.items())]

    def _assign(self, raw: bytes) -> list[tuple[int | None, bytes]]:
        """Return what is complete with the line `raw`, in which several ranks may have written."""
        before, *marked = _MARK.split(raw)
        if not marked:
            return [(None, before)]
        for rank, text in zip(map(int, marked[::2]), marked[1::2], strict=True):
            self._begun[rank] = self._begun.get(rank, b"") + text
        last = int(marked[-2])
        return [*([(None, before)] if before else []), (last, self._begun.pop(last))]

    def _line(self, rank: int | None, text: bytes) -> Line:
        # Of a progress bar, which writes over its own line, what would be seen at the end.
        shown = text.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        self.tails.setdefault(rank, deque(maxlen=_TAIL_LINES)).append(shown)
        return rank, shown
