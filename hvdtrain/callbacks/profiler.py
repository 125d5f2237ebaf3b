"""Write a trace of a few steps, one file a rank."""

from __future__ import annotations

import logging
import os
from typing import Any

from hvdtrain.adapter import framework_of
from hvdtrain.callbacks.base import Callback, RunContext
from hvdtrain.distributed import frameworks
from hvdtrain.system import private_files, scratch

log = logging.getLogger("hvdtrain")


class Profiler(Callback):
    """Record some steps of a torch model with torch.profiler; `directory` receives "rank-0.json", "rank-1.json" ...

    Each rank writes on its own host. Perfetto (https://ui.perfetto.dev) and chrome://tracing show such a file. Recorded
    steps are slower. For a Keras model use `keras.callbacks.TensorBoard(profile_batch=...)`.

    Args:
        directory: where the traces go; existing ones are replaced.
        first: the first step that is recorded, counted from 0 when `fit` starts; the first steps of a run are slower.
        steps: how many steps are recorded; fewer if the run ends before.

    Raises:
        ValueError: first is negative, or steps less than 1.
        TypeError: from `fit`, for a Keras model.
    """

    def __init__(self, directory: str | os.PathLike[str], *, first: int = 10, steps: int = 5) -> None:
        if first < 0 or steps < 1:
            raise ValueError(f"first must be >= 0 and steps >= 1. Received: first={first}, steps={steps}")
        self._directory, self._first, self._last = directory, first, first + steps - 1
        self._step = -1
        self._path = ""
        self._profile: Any = None

    def on_fit_begin(self, trainer: RunContext) -> None:
        """Make the folder."""
        if framework_of(trainer.model) != "torch":
            raise TypeError(
                "Profiler is for torch models. Received: a Keras model. Use "
                "keras.callbacks.TensorBoard(profile_batch=...)."
            )
        folder = scratch.place(self._directory)
        private_files.make_folder(folder)
        self._path, self._step = os.path.join(folder, f"rank-{trainer.world.rank}.json"), -1

    def on_step_begin(self, trainer: RunContext, step: int) -> None:
        """Begin before the first step to be recorded."""
        self._step += 1
        if self._step == self._first:
            self._profile = frameworks.load("torch", "profiling").start()

    def on_step_end(self, trainer: RunContext, step: int) -> None:
        """Write the trace after the last one."""
        if self._step == self._last:
            self.close()

    def close(self) -> None:
        """Write the trace of a run that ends before."""
        if self._profile is not None:
            profile, self._profile = self._profile, None
            frameworks.load("torch", "profiling").stop(profile, self._path)
            log.info("wrote %s", self._path)
