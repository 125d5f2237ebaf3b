"""Say what a long command is doing and how far it is: one line per step, and percent with elapsed time below it."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class BuildProgress:
    """Numbered steps on a stream. On a terminal the percent is rewritten in place, elsewhere every tenth is a line."""

    def __init__(self, steps: int, stream: TextIO | None = None) -> None:
        self._steps = steps
        self._stream = stream if stream is not None else sys.stdout
        self._number = 0
        self._started = time.monotonic()
        self._shown = -1
        self._title = ""

    def step(self, title: str) -> None:
        """Begin the next step."""
        self._number += 1
        self._title = title
        self._started = time.monotonic()
        self._shown = -1
        self._line(f"[{self._number}/{self._steps}] {title}")

    def percent(self, done: int) -> None:
        """Show how far the current step is, in percent."""
        if self._stream.isatty():
            if done != self._shown:
                self._shown = done
                print(f"\r      {done:3d} % · {self.elapsed()}\033[K", end="", file=self._stream, flush=True)
        elif done // 10 > self._shown // 10 or self._shown < 0:
            self._shown = done
            self._line(f"      {done:3d} % · {self.elapsed()}")

    def note(self, text: str) -> None:
        """Add a line to the current step."""
        if self._stream.isatty() and self._shown >= 0:
            print("\r\033[K", end="", file=self._stream)
            self._shown = -1
        self._line(f"      {text}")

    def elapsed(self) -> str:
        """Return the current step's time so far: "41 s", "2 min 5 s"."""
        seconds = int(time.monotonic() - self._started)
        return f"{seconds // 60} min {seconds % 60} s" if seconds >= 60 else f"{seconds} s"

    def _line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)
