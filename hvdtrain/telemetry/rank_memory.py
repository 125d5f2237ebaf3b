"""The memory of a rank's steps: measured, reported when the run ends, and said by an out-of-memory error.

Under `hvdtrain run` a rank also writes what it holds to a file, about once a second. If the kernel then kills the rank
because the host's memory is used up, `hvdtrain run` says it. A Trainer measures its steps. In a script without a
Trainer nothing is done in a step: what the rank holds is counted when an error asks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from hvdtrain.distributed.watchdog import shared_facts, tracebacks
from hvdtrain.system import host_memory
from hvdtrain.system.process_tree import RUN_DIR
from hvdtrain.telemetry.memory import Held, Parts, StepMemory, Use, asked_bytes, is_out_of_memory

log = logging.getLogger("hvdtrain")

_TICK_S = 1.0
NOTE = "hvdtrain: memory of rank "  # the line that `RankMemory.explain` adds begins so


class Place(NamedTuple):
    """A rank's number, and how many ranks its host has."""

    rank: int
    local_size: int


class RankMemory:
    """Says what takes this rank's memory.

    Attributes:
        steps: the measurement.
    """

    def __init__(self, measure: Callable[[], Held], use: Callable[[], Use], place: Callable[[], Place]) -> None:
        self.steps = StepMemory()
        self._measure, self._use, self._place = measure, use, place
        self._posted = ""

    def begin(self) -> None:
        """Begin a fit: the next step is the first."""
        if (held := self._held()) is not None:
            self.steps.begin(held)
            self.post()

    def parts(self, *, asked: float | None = None) -> Parts | None:
        """Return what this rank held in its steps at most; None if it cannot be measured. See `StepMemory.parts`."""
        held = self._held()
        return None if held is None else self.steps.parts(held, asked=asked)

    def report(self) -> None:
        """Log on rank 0 what steps took, if activations are known."""
        parts = self.parts() if self._place().rank == 0 else None
        if parts is not None and parts.activations is not None:
            log.info("memory of rank 0 in a step, at most: %s", parts)

    def explain(self, error: BaseException) -> None:
        """Add to an error that says that memory ran out what takes it, and the option that shrinks the largest part."""
        if not is_out_of_memory(error) or NOTE in f"{error}{getattr(error, '__notes__', '')}":
            return
        self.steps.end_step()
        parts = self.parts(asked=asked_bytes(error))
        if parts is not None:
            _add_note(error, f"{NOTE}{self._place().rank}: {self._advice(parts)}")

    def post(self) -> None:
        """Write for `hvdtrain run` what this rank holds on its host, in case that the kernel kills it."""
        held = self._held() if RUN_DIR in os.environ else None
        if held is None:
            return
        (rank, local_size), parts, when = self._place(), self.steps.parts(held), ""
        if parts.activations is None:  # in the first step they may take what is left of the limit
            when, share = "in its first step up to ", (host_memory.limit() or 0) / local_size
            left = share - host_memory.resident() - held.missing
            parts = replace(parts, activations=max(0.0, left))
        text = f"{when}{self._advice(parts)}"
        if held.device is not None:
            text = "nothing of the model, which is on a GPU: look at the data and at what prepares it"
        if text != self._posted:
            self._posted = text
            # The job and the count are for `hvdtrain run` on another host: see `process_tree.memory`.
            facts: dict[str, Any] = {"job": os.environ[RUN_DIR], "oom_kills": host_memory.host_oom_kills()}
            shared_facts.open_facts(rank).post("memory", {"text": text} | facts)

    def _advice(self, parts: Parts) -> str:
        use = self._use()
        plan = "" if use.in_script else ". `hvdtrain plan --memory` compares the options"
        return f"{parts}. {use.advice(parts)}{plan}"

    def _held(self) -> Held | None:
        try:
            return self._measure()
        except Exception:  # such as a tensor of a class of the user's own, without a size
            log.debug("memory cannot be measured", exc_info=True)
            return None


class _ScriptMemory(RankMemory):
    """The memory of a rank whose script has no Trainer. Steps are not seen: all since `begin` counts as theirs."""

    def begin(self) -> None:
        """Measure from here on, as late as possible before the first step; under `hvdtrain run` also in a thread."""
        if (held := self._held()) is None:
            return
        is_first, self.steps = not self.steps.has_begun, StepMemory()
        self.steps.begin(held)
        self.steps.begin_step()
        self.post()
        if is_first and RUN_DIR in os.environ:
            threading.Thread(target=self._post_often, name="hvdtrain-memory", daemon=True).start()

    def _post_often(self) -> None:
        """Post after more memory was taken than before, once a second at most.

        In the first step this tells too little. It has ended, as far as it is known, when no more is taken for a tick.
        """
        before = posted = host_memory.peak()
        tick = threading.Event()
        while not tick.wait(_TICK_S) and _current() is self:
            is_steady, before = before == (peak := host_memory.peak()), peak
            if is_steady and peak > posted:
                posted = peak
                self.steps.end_step()
                with contextlib.suppress(Exception):  # Horovod was shut down
                    self.post()


# What speaks for this process when an exception ends it; a Trainer's ends with its Trainer.
_speaker: weakref.ref[RankMemory] | None = None
_script: _ScriptMemory | None = None


def speak(memory: RankMemory) -> None:
    """Let a Trainer's memory speak for this process, as long as the Trainer lives."""
    global _speaker
    _speaker = weakref.ref(memory)
    tracebacks.explain_with(_explain)


def measure_script(measure: Callable[[], Held], use: Callable[[], Use], place: Callable[[], Place]) -> None:
    """Let a script's memory speak for this process, measured from here on, unless a Trainer's does.

    To be called when an optimizer was made distributed, and when one gets its variables: the last call counts.
    """
    global _script
    with contextlib.suppress(Exception):  # it must never fail what it measures
        if _current() not in (None, _script):
            return
        if _script is None:
            _script = _ScriptMemory(measure, use, place)
        speak(_script)
        _script.begin()


def is_of_script() -> bool:
    """True if the script has made an optimizer distributed, and has no Trainer."""
    return _script is not None and _current() is _script


def forget() -> None:
    """Let nothing speak for this process: for tests."""
    global _speaker, _script
    _speaker = _script = None


def _current() -> RankMemory | None:
    return None if _speaker is None else _speaker()


def _explain(error: BaseException) -> None:
    if (memory := _current()) is not None:
        memory.explain(error)


def _add_note(error: BaseException, note: str) -> None:
    """Add a line to an error's message; beside it where the error's class makes the message itself."""
    text = f"{error}\n{note}"
    with contextlib.suppress(Exception):
        error.args = (text,)
        if hasattr(error, "_message"):  # TensorFlow's
            error._message = text
    if note not in str(error) and hasattr(error, "add_note"):
        error.add_note(note)
