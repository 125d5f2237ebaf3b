"""Leave out what a launcher and Horovod print about failures that `hvdtrain run` or the ranks say in one line."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator

_RULE = re.compile(rb"-{60,}$")
# The beginnings of mpirun's texts between two rules. The supervisor reports which rank ended, and how.
_ABOUT_AN_END = (
    b"Primary job  terminated normally, but",
    *(
        launcher + text
        for launcher in (b"mpirun ", b"prterun ")
        for text in (b"detected that one or more processes exited with non-zero status", b"noticed that process rank ")
    ),
)
# The same of horovodrun over Gloo, its last text of four lines.
_GLOO_END = re.compile(
    rb"(Process \d+ exit with status code -?\d+|Terminating remaining workers after failure of .*)\.$"
)
_GLOO_LAST = b"Horovod detected that one or more processes exited with non-zero status"
_GLOO_LAST_REST = re.compile(rb"(Process name: \d+|Exit code: -?\d+|)$")
# What a rank prints over Gloo when another rank has ended: its shell, and Horovod's thread.
_TERMINATED = re.compile(rb"\[\d+\]<stderr>:Terminated$")
_CONNECTION_LOST = re.compile(
    rb"\[[^\]]*: E \S*/horovod/common/operations\.cc:\d+\] .*Horovod background loop uncaught exception: "
    rb".*(Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed)"
)
_STALL = re.compile(rb"\[[^\]]*: W \S*/horovod/common/stall_inspector\.cc:\d+\] ")
_STALLED = re.compile(rb"(Missing ranks:$|\d+: \[)")
# Horovod repeats its warning at least every minute for as long as a stall lasts.
_REPEATED_S = 150.0


class Shortened:
    """Shortens one stream of a launcher's output. A line comes as its mark, empty for its own, and its text."""

    def __init__(self) -> None:
        self._rule: bytes | None = None  # held until the next line shows whether it begins one of mpirun's texts
        self._is_inside = self._is_after_gloos = False
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
        if _TERMINATED.match(mark + text) or _CONNECTION_LOST.match(text):
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
        if _GLOO_END.match(text) or text.startswith(_GLOO_LAST):
            self._is_after_gloos = text.startswith(_GLOO_LAST)
            return
        if self._is_after_gloos and _GLOO_LAST_REST.match(text):
            return
        self._is_after_gloos = False
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
