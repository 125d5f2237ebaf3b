"""Split a launcher's output into whole lines, each with the rank that printed it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator

from hvdtrain.system import open_mpi

# What precedes each piece of a rank's output: "[1,0]<stdout>:" over MPI, "[0]<stdout>:" over Gloo, and before that
# the time, "Sat Nov 21 20:05:27 2026" (Open MPI 5: in brackets), where an option requests it.
_TIME = re.compile(rb"\[?[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\]?")
_TAG = rb"\[(?:\d+,)?\d+\]<(?:stdout|stderr)>:?"
_MARK, _TIMED_MARK = re.compile(rb"(" + _TAG + rb")"), re.compile(rb"(" + _TIME.pattern + _TAG + rb")")
_ITS_MARK = re.compile(rb"^(?:" + _TIME.pattern + rb")?" + _TAG)
_RANK = re.compile(rb"(\d+)\]<")
_TAIL_LINES = 15

Line = tuple[int | None, str]


class _Pieces:
    """Joins the pieces of ranks' lines; gives pairs of a mark, empty for the launcher's own, and a line."""

    def __init__(self) -> None:
        self.begun: dict[bytes, bytes] = {}
        self.raw = b""
        self._mark: re.Pattern[bytes] | None = None  # which of the two, once one was seen

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Return the lines that `data` completes."""
        *whole, self.raw = (self.raw + data).split(b"\n")
        for raw in whole:
            before, *marked = self._split(raw)
            if before or not marked:
                yield b"", before
            if marked:
                yield marked[-2], self._join(marked)

    def end(self) -> Iterator[tuple[bytes, bytes]]:
        """Return the pieces of lines that have no end."""
        yield from self.feed(b"\n") if self.raw else ()
        yield from self.begun.items()
        self.begun = {}

    def _split(self, raw: bytes) -> list[bytes]:
        if self._mark is None and (first := _MARK.search(raw)):
            timed = _TIMED_MARK.search(raw)  # a rank may print a time too, but behind a mark
            self._mark = _TIMED_MARK if timed and timed.start() < first.start() else _MARK
        return self._mark.split(raw) if self._mark else [raw]

    def _join(self, marked: list[bytes]) -> bytes:
        """Store pieces for their ranks; return the line of the last one, which is complete."""
        for mark, text in zip(marked[::2], marked[1::2], strict=True):
            tag = _TIME.sub(b"", mark)  # the next piece of the same line may have another time
            own = text[1:] if b"," in tag and text.startswith(b" ") and open_mpi.spaces_marks() else text
            self.begun[tag] = self.begun.get(tag, b"") + own
        return self.begun.pop(tag)


class OutputLines:
    """One stream of a launcher's output, as it comes in pieces."""

    def __init__(self) -> None:
        self.tails: dict[int | None, deque[str]] = {}  # rank -> its last lines; None: the launcher
        self._pieces = _Pieces()

    def all(self, data: bytes) -> list[Line]:
        """Return the lines of `data`, after which nothing follows; see `feed`."""
        return [*self.feed(data), *self.end()]

    def feed(self, data: bytes) -> list[Line]:
        """Return the lines that `data` completes, as (rank, text); the launcher's own have rank None."""
        return [self._line(mark, text) for mark, text in self._pieces.feed(data)]

    def end(self) -> list[Line]:
        """Return the pieces of lines that have no end."""
        return [self._line(mark, text) for mark, text in self._pieces.end()]

    def _line(self, mark: bytes, text: bytes) -> Line:
        found = _RANK.search(mark)
        rank = int(found.group(1)) if found else None
        shown = _seen(text).decode(errors="replace")
        self.tails.setdefault(rank, deque(maxlen=_TAIL_LINES)).append(shown)
        return rank, shown


class MarkedLines:
    """The same stream for the screen: lines with their marks, but whole even if ranks write at the same time."""

    def __init__(self) -> None:
        self._pieces = _Pieces()
        self._since: dict[bytes | None, float] = {}  # when a line was begun; None: one that is not split yet

    def feed(self, data: bytes, *, now: float) -> list[bytes]:
        """Return the lines that `data` completes, without their end."""
        return self._shown(self._pieces.feed(data), now, newly=b"\n" in data)

    def begun(self) -> float | None:
        """Return when the oldest line was begun that has no end yet, None if there is none."""
        return min(self._since.values(), default=None)

    def late(self, *, now: float, limit_s: float) -> list[bytes]:
        """Return as lines what has waited so long for its end: it may be a progress bar."""
        waited = {mark for mark, since in self._since.items() if now - since >= limit_s}
        found = [(mark, self._pieces.begun.pop(mark)) for mark in waited if mark is not None]
        if None in waited:
            found += self._pieces.feed(b"\n")
        return self._shown(found, now, newly=None in waited)

    def end(self) -> list[bytes]:
        """Return the pieces of lines that have no end."""
        return self._shown(self._pieces.end(), 0.0, newly=True)

    def _shown(self, found: Iterable[tuple[bytes, bytes]], now: float, *, newly: bool) -> list[bytes]:
        """Return lines as they are printed, and record when the incomplete lines began."""
        lines = list(found)
        begun = {_TIME.sub(b"", mark) for mark, _ in lines} | ({None} if newly else set())
        still = [*self._pieces.begun, *([None] if self._pieces.raw else [])]
        self._since = {each: now if each in begun else self._since.get(each, now) for each in still}
        return [mark + _seen(text) for mark, text in lines]


def split_mark(line: bytes) -> tuple[bytes, bytes]:
    """Return the mark of a line of `MarkedLines`, empty for the launcher's own, and its text."""
    end = found.end() if (found := _ITS_MARK.match(line)) else 0
    return line[:end], line[end:]


def _seen(text: bytes) -> bytes:
    """Return the last state of a progress bar, which overwrites its own line."""
    return text.rstrip(b"\r").rpartition(b"\r")[2]
