"""Record where this process's time goes: data, compute, reduction, other.

All code that works or waits, World's collectives too, reports to `recorder`. Heartbeat and `hvdtrain bench` read it.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, Literal, NamedTuple

Part = Literal["data", "compute", "backward", "other", "outside"]


class Seconds(NamedTuple):
    """Seconds by part."""

    data: float = 0.0  # loading batches
    compute: float = 0.0  # forward pass, update, and the backward pass if it is not reported separately
    backward: float = 0.0
    other: float = 0.0  # callbacks and other work between steps
    outside: float = 0.0  # between series of steps, for example validation
    reduction: float = 0.0  # waiting for other ranks during compute and backward
    elsewhere: float = 0.0  # waiting for other ranks during data and other

    @property
    def waited(self) -> float:
        """Seconds of waiting for other ranks."""
        return self.reduction + self.elsewhere

    def since(self, earlier: Seconds) -> Seconds:
        """Return the seconds since an earlier reading."""
        return Seconds._make(map(operator.sub, self, earlier))


_MOST_UNREAD = 20_000
_WAITS = {"compute": "reduction", "backward": "reduction", "outside": "outside"}  # else "elsewhere"


class Clock:
    """The host's clock, whose marks are seconds; the clock of `hvdtrain.torch.ops.gpu_clock` runs behind the host."""

    runs_behind = False  # True if a mark lies in the future when it is made

    def __init__(self, mark: Callable[[], Any] = time.perf_counter) -> None:
        self.mark = mark

    def seconds(self, began: Any, ended: Any) -> float:
        """Return the seconds from one mark to a later mark that the clock has reached."""
        return float(ended - began)

    def reach(self, mark: Any) -> None:
        """Wait until the clock has reached a mark."""


class Recorder(ContextDecorator):
    """Adds up the seconds of each part, reported by the code that ends it, and of waiting, from any thread."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.on_step: Callable[[Seconds], None] | None = None  # called with each step's seconds, after `step_done`
        self.exchanges: int | None = None  # of weights, so far; None without a strategy that exchanges them
        self._lock = threading.RLock()
        self._seconds: dict[str, float] = dict.fromkeys(Seconds._fields, 0.0)
        self._own = self._waited = 0.0  # since a part ended
        self._waits = 0  # current waits: they may be nested, and in several threads
        self._last_step = Seconds()
        self._graphs: list[tuple[Callable[[], float], list[float]]] = []
        self._unread: deque[tuple[Any, int, Part | None, bool]] = deque()  # of a clock that runs behind
        self._unread_steps = 0  # how many of these belong to steps that have ended
        self.use(clock or Clock())

    def use(self, clock: Clock) -> None:
        """Measure with another clock from now on."""
        with self._lock:
            self._read(len(self._unread))
            self._clock, self._now, self._behind = clock, clock.mark, clock.runs_behind
            self._last = clock.mark()

    def ended(self, part: Part) -> None:
        """Count the time since the last part ended as `part`, except for wait times."""
        with self._lock:
            if self._behind or self._waits or self._waited:
                self._mark(part)
                return
            now = self._now()  # the usual case, at half the cost: a step reports four parts
            self._seconds[part] += self._own + now - self._last
            self._own, self._last = 0.0, now

    def step_done(self) -> None:
        """End a step and its last part, compute; calls `on_step`."""
        with self._lock:
            self._mark("compute", True)

    def exchanged(self) -> None:
        """Count an exchange of weights, which takes place between a step's end and the next one's."""
        with self._lock:
            self.exchanges = (self.exchanges or 0) + 1

    def waiting(self) -> Recorder:
        """Return a context manager, or decorator, that counts the time within as waiting for other ranks."""
        return self

    def __enter__(self) -> None:
        with self._lock:
            if not self._waits:
                self._mark(None)
            self._waits += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            if self._waits == 1:
                self._mark(None)
            self._waits -= 1

    def move(self, part: Part, seconds: float) -> None:
        """Count `seconds` of the current part as `part`."""
        with self._lock:
            self._seconds[part] += max(0.0, seconds)
            self._own -= max(0.0, seconds)

    def note_graph(self, seconds: Callable[[], float]) -> None:
        """Count a graph's wait time so far, which `seconds` returns, as reduction instead of compute."""
        self._graphs.append((seconds, [0.0]))

    def read_graphs(self) -> None:
        """Add the wait times of graphs since the last call."""
        for read, counted in self._graphs:
            with contextlib.suppress(Exception):  # the variable of a session that was cleared
                seconds = read()
                self._seconds["reduction"] += seconds - counted[0]
                self._seconds["compute"] -= seconds - counted[0]
                counted[0] = seconds

    def read(self) -> Seconds:
        """Return the seconds up to the end of the last part; waits until the clock has reached that."""
        with self._lock:
            self._read(len(self._unread))
            self.read_graphs()
            return Seconds._make(self._seconds.values())

    def _mark(self, part: Part | None, is_step: bool = False) -> None:
        mark = self._now()
        if not self._behind:
            seconds, self._last = mark - self._last, mark
            self._count(seconds, self._waits, part, is_step)
            return
        self._unread.append((mark, self._waits, part, is_step))
        if is_step:  # no step waits for its own end
            self._read(self._unread_steps)
            self._unread_steps = len(self._unread)
        elif len(self._unread) >= _MOST_UNREAD:  # there are no steps, for example during evaluation
            self._read(_MOST_UNREAD // 2)

    def _read(self, marks: int) -> None:
        if marks:
            self._clock.reach(self._unread[marks - 1][0])
        self._unread_steps = 0
        for _ in range(marks):
            mark, waits, part, is_step = self._unread.popleft()
            seconds, self._last = self._clock.seconds(self._last, mark), mark
            self._count(seconds, waits, part, is_step)

    def _count(self, seconds: float, waits: int, part: Part | None, is_step: bool) -> None:
        if waits:
            self._waited += seconds
        else:
            self._own += seconds
        if part is None:
            return
        self._seconds[part] += self._own
        self._own = 0.0
        if self._waited:
            self._seconds[_WAITS.get(part, "elsewhere")] += self._waited
            self._waited = 0.0
        if is_step and self.on_step is not None:
            now = Seconds._make(self._seconds.values())
            step, self._last_step = now.since(self._last_step), now
            self.on_step(step)


recorder = Recorder()
