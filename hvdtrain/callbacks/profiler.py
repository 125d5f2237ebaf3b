"""Write a trace of a few steps, one a rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from hvdtrain.adapter import framework_of
from hvdtrain.callbacks.base import Callback, RunContext
from hvdtrain.distributed import frameworks
from hvdtrain.system import private_files, scratch

log = logging.getLogger("hvdtrain")


class Profiler(Callback):
    """Record some steps with the framework's profiler, torch.profiler for example; each rank writes on its own host.

    With torch, `directory` receives "rank-0.json", "rank-1.json" ..., which Perfetto (https://ui.perfetto.dev) and
    chrome://tracing show. On TensorFlow and JAX it receives folders "rank-0", "rank-1" ..., which TensorBoard with its
    profile plugin shows. Each step is marked by its `global_step`, as "step 10". Recorded steps are slower.

    If the environment has HOROVOD_TIMELINE=DYNAMIC, rank 0 writes "timeline.json" too: Horovod's timeline of these
    steps, with all ranks. Perfetto and chrome://tracing show it.

    Args:
        directory: where the traces go. JSON files replace existing ones; a folder receives one more trace.
        first: the first step that is recorded, counted from 0 when `fit` starts; the first steps of a run are slower.
        steps: how many steps are recorded; fewer if the run ends before.

    Raises:
        ValueError: first is negative, or steps less than 1.
    """

    def __init__(self, directory: str | os.PathLike[str], *, first: int = 10, steps: int = 5) -> None:
        if first < 0 or steps < 1:
            raise ValueError(f"first must be >= 0 and steps >= 1. Received: first={first}, steps={steps}")
        self._directory, self._first, self._last = directory, first, first + steps - 1
        self._step = -1
        self._trace: Any = None  # a framework's, see `hvdtrain.torch.profiling`
        self._mark: Any = None  # of the current step
        self._stop_timeline: Callable[[], None] | None = None

    def on_fit_begin(self, trainer: RunContext) -> None:
        """Make the folder."""
        self._step, self._folder = -1, scratch.place(self._directory)
        private_files.make_folder(self._folder)

    def on_step_begin(self, trainer: RunContext, step: int) -> None:
        """Begin before the first step to be recorded."""
        self._step += 1
        if self._step == self._first:
            self._stop_timeline = trainer.world.start_timeline(self._folder / "timeline.json")
            place = os.path.join(self._folder, f"rank-{trainer.world.rank}")
            self._trace = frameworks.load(framework_of(trainer.model), "profiling").trace(place)
        if self._trace is not None:
            self._mark = self._trace.step(trainer.global_step)
            self._mark.__enter__()

    def on_step_end(self, trainer: RunContext, step: int) -> None:
        """Write the trace after the last one."""
        self._end_mark()
        if self._step == self._last:
            self.close()

    def close(self) -> None:
        """Write the trace of a run that ends before."""
        self._end_mark()
        stop, self._stop_timeline = self._stop_timeline, None
        if stop is not None:
            stop()
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.close()
            log.info("wrote %s", trace.path)

    def _end_mark(self) -> None:
        if self._mark is not None:
            mark, self._mark = self._mark, None
            mark.__exit__(None, None, None)
