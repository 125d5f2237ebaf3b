"""The memory of a rank's steps: measured, reported when the run ends, and said by an out-of-memory error.

Under `hvdtrain run` a rank also writes what it holds to a file, about once a second. If the kernel then kills the rank
because the host's memory is used up, `hvdtrain run` says it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hvdtrain.adapter import Adapter
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.watchdog import shared_facts
from hvdtrain.distributed.world import World
from hvdtrain.system import host_memory
from hvdtrain.system.process_tree import RUN_DIR
from hvdtrain.telemetry.memory import Held, Parts, StepMemory, Use, asked_bytes, is_out_of_memory

log = logging.getLogger("hvdtrain")


class RunMemory:
    """Measures the memory of this rank's steps, and says what takes it.

    Attributes:
        steps: the measurement.
    """

    def __init__(self, adapter: Adapter, world: World, framework: str, options: Mapping[str, Any]) -> None:
        self.steps = StepMemory()
        self._adapter, self._world = adapter, world
        self._use = Use(framework, DataRanks(world).size, options)
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
        parts = self.parts() if self._world.is_root else None
        if parts is not None and parts.activations is not None:
            log.info("memory of rank 0 in a step, at most: %s", parts)

    def explain(self, error: BaseException) -> None:
        """Add to an error that says that memory ran out what takes it, and the option that shrinks the largest part."""
        if not is_out_of_memory(error):
            return
        self.steps.end_step()
        parts = self.parts(asked=asked_bytes(error))
        if parts is not None:
            _add_note(error, f"hvdtrain: memory of rank {self._world.rank}: {self._advice(parts)}")

    def post(self) -> None:
        """Write for `hvdtrain run` what this rank holds on its host, in case that the kernel kills it."""
        held = self._held() if RUN_DIR in os.environ else None
        if held is None:
            return
        parts, when = self.steps.parts(held), ""
        if parts.activations is None:  # in the first step they may take what is left of the limit
            when, share = "in its first step up to ", (host_memory.limit() or 0) / self._world.local_size
            left = share - host_memory.resident() - held.missing
            parts = replace(parts, activations=max(0.0, left))
        text = f"{when}{self._advice(parts)}"
        if held.device is not None:
            text = "nothing of the model, which is on a GPU: look at the data and at what prepares it"
        if text != self._posted:
            self._posted = text
            shared_facts.open_facts(self._world.rank).post("memory", {"text": text})

    def _advice(self, parts: Parts) -> str:
        return f"{parts}. {self._use.advice(parts)}. `hvdtrain plan --memory` compares the options"

    def _held(self) -> Held | None:
        try:
            return self._adapter.memory()
        except Exception:  # such as a tensor of a class of the user's own, without a size
            log.debug("memory cannot be measured", exc_info=True)
            return None


def _add_note(error: BaseException, note: str) -> None:
    """Add a line to an error's message; beside it where the error's class makes the message itself."""
    text = f"{error}\n{note}"
    with contextlib.suppress(Exception):
        error.args = (text,)
        if hasattr(error, "_message"):  # TensorFlow's
            error._message = text
    if note not in str(error) and hasattr(error, "add_note"):
        error.add_note(note)
