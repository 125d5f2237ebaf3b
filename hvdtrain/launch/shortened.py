"""Leave out what a launcher and Horovod print about failures that `hvdtrain run` or the ranks say in one line."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator

_RULE = re.compile(rb"-{60,}$")
# The beginnings of mpirun's texts between two rules. The supervisor reports which rank ended, and how.
_ABOUT_AN_END = (
    b"Primary job  terminated normally, but",
    b"mpirun detected that one or more processes exited with non-zero status",
    b"prterun detected that one or more processes exited with non-zero status",
)
_STALL = re.compile(rb"\[[^\]]*: W \S*/horovod/common/stall_inspector\.cc:\d+\] ")
_STALLED = re.compile(rb"(Missing ranks:$|\d+: \[)")
# Horovod repeats its warning at least every minute for as long as a stall lasts.
_REPEATED_S = 150.0


class Shortened:
    """Shortens one stream of a launcher's output. A line comes as its mark, empty for its own, and its text."""

    def __init__(self) -> None:
        self._rule: bytes | None = None  # held until the next line shows whether it begins one of mpirun's texts
        self._is_inside = False
        self._said: dict[bytes, float] = {}  # Horovod's lines about stalled tensors, and when they came last
        self._heading: tuple[bytes, ...] | None = None  # of a warning whose lines may all have been said
        self._in_warning = False

    def feed(self, lines: Iterable[tuple[bytes, bytes]], *, now: float | None = None) -> list[bytes]:
        """Return the lines to show."""
        moment = time.monotonic() if now is None else now
        return [shown for mark, text in lines for shown in self._line(mark, text, moment)]

    def end(self) -> list[bytes]:
        """Return a line that was still held."""
        held, self._rule = self._rule, None
        return [] if held is None else [held]

    def _line(self, mark: bytes, text: bytes, now: float) -> Iterator[bytes]:
        if not mark:
            yield from self._launchers(text)
            return
        if found := _STALL.match(text):
            self._in_warning, self._heading = True, (mark + b"Horovod: " + text[found.end() :],)
        elif self._in_warning and _STALLED.match(text):
            if text.endswith(b":"):
                self._heading = (*(self._heading or ()), mark + text)
                return
            is_new = now - self._said.get(text, -_REPEATED_S) >= _REPEATED_S
            self._said[text] = now
            if is_new:
                yield from self._heading or ()
                self._heading = None
                yield mark + text
        else:
            self._in_warning = False
            yield mark + text

    def _launchers(self, text: bytes) -> Iterator[bytes]:
        is_rule = bool(_RULE.match(text))
        if self._is_inside:
            self._is_inside = not is_rule
            return
        held, self._rule = self._rule, None
        if held is not None and text.startswith(_ABOUT_AN_END):
            self._is_inside = True
            return
        if held is not None:
            yield held
        if is_rule:
            self._rule = text
        else:
            yield text
