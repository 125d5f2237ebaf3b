"""Record what Keras's backend does, with the backend's own profiler."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import keras


class Trace:
    """Records a TensorFlow or JAX program until `close` writes a folder, `path`, which TensorBoard shows."""

    def __init__(self, place: str) -> None:
        self.path = place
        if keras.backend.backend() == "jax":
            jax = importlib.import_module("jax.profiler")
            start, self.close, self._mark = jax.start_trace, jax.stop_trace, jax.StepTraceAnnotation
        else:
            tf = importlib.import_module("tensorflow").profiler.experimental
            start, self.close, self._mark = tf.start, tf.stop, partial(tf.Trace, _r=1)
        start(place)

    def step(self, number: int) -> AbstractContextManager[object]:
        """Mark a step in the trace."""
        mark: AbstractContextManager[object] = self._mark(f"step {number}", step_num=number)
        return mark


def trace(place: str) -> Any:
    """Begin to record, for a file or folder at `place`."""
    if keras.backend.backend() == "torch":
        return importlib.import_module("hvdtrain.torch.profiling").Trace(place)
    return Trace(place)
