"""Report from outside where a Keras step loads and ends, for `hvdtrain bench`.

A step is as many calls of the compiled train function as update the weights: several under accumulation. A call of
several batches (steps_per_execution) may update more than once; samples and gradients are then those of all updates.
Data wait is the time from the end of a call to the next one's batch. On TensorFlow the graph itself notes when the
batch is there, and `backends.tensorflow` how long it waited for ranks; what it computes meanwhile counts as waiting.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras

from hvdtrain.keras.memory import held_by
from hvdtrain.keras.optimizer import distributed_part
from hvdtrain.keras.variables import num_bytes
from hvdtrain.telemetry.memory import StepMemory
from hvdtrain.telemetry.step_times import StepTimes


def attach(times: StepTimes) -> Callable[[], None]:
    """Let every step of this process be recorded; return what detaches it from models compiled later."""
    backend = keras.backend.backend()
    if backend == "torch":
        from hvdtrain.torch.ops import gpu_clock

        times.recorder.use(gpu_clock.of_bench())
    marks = (_TensorFlowMarks if backend == "tensorflow" else _KerasMarks)(times)
    make = keras.Model.make_train_function

    @functools.wraps(make)
    def make_train_function(self: Any, force: bool = False) -> Any:
        before = self.train_function
        # While the step is made; the compiled function holds it.
        vars(self)["train_step"] = marks.on_batch(self.train_step)
        try:
            result = make(self, force=force)
        finally:
            del vars(self)["train_step"]
        if self.train_function is not before:
            self.train_function = marks.stepping(self, self.train_function)
        return result

    keras.Model.make_train_function = make_train_function
    return lambda: setattr(keras.Model, "make_train_function", make)


class _KerasMarks:
    """Reports the ends of steps and the waits for batches; the backends report the waits for other ranks themselves."""

    def __init__(self, times: StepTimes) -> None:
        self._facts, self._recorder = times.facts, times.recorder
        self._batches = 0  # since the last update
        self._samples = 0  # of the step in progress
        self._times, self._memory = times, StepMemory()

    def on_batch(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `train_step`, with a mark for the batch's arrival where it can be seen there."""
        return train_step

    def stepping(self, model: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the train function, with marks around it."""

        @functools.wraps(function)
        def step(*args: Any) -> Any:
            if not self._memory.has_begun:  # to ask each weight for its size takes time of the step
                self._memory.begin(held_by(model))
            self._memory.begin_step()
            in_graph = hasattr(args[-1], "get_next")  # tf.data's own iterator, as fit gives it
            if not in_graph:
                self._recorder.ended("data")
            result = function(*args[:-1], args[-1] if in_graph else self._timed(args[-1]))
            self._finish(result, in_graph)
            self._memory.end_step()
            self._times.memory = lambda: self._memory.parts(held_by(model))
            self._called(model)
            return result

        return step

    def _finish(self, result: Any, in_graph: bool) -> None:
        """Wait for what was handed over, where a call returns before: else a step would seem to end then."""
        if keras.backend.backend() == "jax":
            import jax

            jax.block_until_ready(result)

    def _called(self, model: Any) -> None:
        """Report the end of a call, and with it the end of the step where weights were updated."""
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        self._batches += model.steps_per_execution or 1
        updates, self._batches = divmod(self._batches, getattr(inner, "gradient_accumulation_steps", None) or 1)
        if not updates:
            self._recorder.ended("compute")
            return
        facts = self._facts
        facts["samples_per_step"] = max(self._samples, facts.get("samples_per_step", 0))
        self._samples = 0
        if "gradient_bytes" not in facts:
            how = inner._hvd_how if distributed_part(inner) is not None else None
            facts |= {
                "framework": f"keras/{keras.backend.backend()}",
                "gradient_bytes": updates * sum(num_bytes(v) for v in model.trainable_variables),
                "reduced": bool(how is not None and how.active()),
                "wire": how.compression.name if how else "none",
            }
        self._recorder.step_done()

    def _timed(self, batches: Any) -> Any:
        """Return `batches` with the wait for each reported; a batch as it is."""
        if not isinstance(batches, Iterator):
            self._see(batches)
            return batches

        def each() -> Iterator[Any]:
            self._recorder.ended("compute")
            for batch in batches:
                self._recorder.ended("data")
                self._see(batch)
                yield batch
                self._recorder.ended("compute")

        return each()

    def _see(self, batch: Any) -> None:
        shapes = [leaf.shape for leaf in keras.tree.flatten(batch) if getattr(leaf, "shape", None)]
        if shapes:
            self._samples += int(shapes[0][0])


class _TensorFlowMarks(_KerasMarks):
    def __init__(self, times: StepTimes) -> None:
        super().__init__(times)
        self._ended_at = time.time()
        times.facts["clock"] = "TensorFlow's graph"

    @functools.cached_property
    def _seen(self) -> tuple[Any, Any]:
        """Variables: the arrival of a call's first batch, in seconds since 1970, and the samples of all its batches."""
        # Not at once: a variable starts TensorFlow's runtime, which has to know of this rank's GPU before.
        import tensorflow as tf

        with tf.init_scope(), tf.device("/CPU:0"):
            return tf.Variable(0.0, dtype="float64", trainable=False), tf.Variable(0, dtype="int64", trainable=False)

    def on_batch(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `train_step`, which first notes when its batch is there."""
        import tensorflow as tf

        @functools.wraps(train_step)
        def marked(data: Any) -> Any:
            batch_at, samples = self._seen
            leaves = [leaf for leaf in keras.tree.flatten(data) if isinstance(leaf, tf.Tensor)]
            with tf.control_dependencies(leaves):
                # The first one, where Keras takes several steps in a call.
                noted = batch_at.assign(tf.where(tf.equal(batch_at, 0.0), tf.timestamp(), batch_at))
            if leaves and leaves[0].shape.rank:
                samples.assign_add(tf.shape(leaves[0], tf.int64)[0])
            # The forward pass after the clock: TensorFlow may run what is ready in any order.
            with tf.control_dependencies([noted]):
                data = keras.tree.map_structure(lambda x: tf.identity(x) if isinstance(x, tf.Tensor) else x, data)
            return train_step(data)

        marker: Callable[..., Any] = tf.autograph.experimental.do_not_convert(marked)
        return marker

    def _finish(self, result: Any, in_graph: bool) -> None:
        """Read the graph's variables: the step is over."""
        batch_at, samples = self._seen
        self._recorder.read_graphs()
        if in_graph:
            self._recorder.move("data", float(batch_at.numpy()) - self._ended_at)
        self._samples += int(samples.numpy())
        batch_at.assign(0.0)
        samples.assign(0)

    def _called(self, model: Any) -> None:
        super()._called(model)
        self._ended_at = time.time()

    def _see(self, batch: Any) -> None:
        """Do nothing: the graph counts every batch."""
