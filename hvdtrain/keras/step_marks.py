"""Where a Keras step begins, waits and ends: tells `hvdtrain.telemetry.step_times`, attached from outside.

A step is as many calls of the compiled train function as update the weights: several under accumulation. A call of
several batches (steps_per_execution) may update more than once; samples and gradients are then those of all updates.
Data wait is the time from the end of a call to the next one's batch.
On TensorFlow the reduction is inside the graph, and so is fetching a batch under fit. There the graph itself notes the
time: when the batch is there, when the last local gradient is ready, and when the last reduced one is. What it computes
in between, in an order of its own, cannot be told from waiting.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras

from hvdtrain.keras.backends import backend_module
from hvdtrain.keras.optimizer import distributed_part
from hvdtrain.telemetry.step_times import Recorder


def attach(recorder: Recorder) -> Callable[[], None]:
    """Let every step of this process be recorded; return what takes it all back from models compiled later."""
    backend = keras.backend.backend()
    marks = {"tensorflow": _TensorFlowMarks, "torch": _TorchMarks, "jax": _JaxMarks}[backend](recorder)
    reducing, name = backend_module(), marks.reduction
    reduce, make = getattr(reducing, name), keras.Model.make_train_function
    setattr(reducing, name, marks.reducing(reduce))
    keras.Model.make_train_function = _making(make, marks)

    def detach() -> None:
        setattr(reducing, name, reduce)
        keras.Model.make_train_function = make

    return detach


def _making(make: Callable[..., Any], marks: _Marks) -> Callable[..., Any]:
    @functools.wraps(make)
    def make_train_function(self: Any, force: bool = False) -> Any:
        before = self.train_function
        # While the step is made; what is compiled keeps it.
        vars(self)["train_step"] = marks.on_batch(self.train_step)
        try:
            result = make(self, force=force)
        finally:
            del vars(self)["train_step"]
        if self.train_function is not before:
            self.train_function = marks.stepping(self, self.train_function)
        return result

    return make_train_function


class _Marks:
    """What the backends share: the ends of steps, and the time up to the next one."""

    reduction = "reduce_gradients"  # the function of the backend's module that waits for the other ranks

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._ended = recorder.clock()
        self._batches = 0  # since the last update
        self._samples = 0  # of the step under way

    def on_batch(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `train_step`, with a mark for the batch's arrival where it can be seen there."""
        return train_step

    def reducing(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        """Return `reduce`, timed as exposed communication."""

        @functools.wraps(reduce)
        def measured(*args: Any, **kwargs: Any) -> Any:
            began = self.recorder.clock()
            try:
                return reduce(*args, **kwargs)
            finally:
                self.recorder.waited(self.recorder.clock() - began)

        return measured

    def stepping(self, model: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the train function, with marks around it."""

        @functools.wraps(function)
        def step(*args: Any) -> Any:
            self.recorder.waited_for_data(self.recorder.clock() - self._ended)
            result = function(*args[:-1], self._timed(args[-1]))
            self.finish(result)
            self.called(model)
            return result

        return step

    def called(self, model: Any) -> None:
        """Note the end of a call, and with it the end of the step where weights were updated."""
        optimizer = distributed_part(model.optimizer) or getattr(model.optimizer, "inner_optimizer", model.optimizer)
        self._batches += model.steps_per_execution or 1
        updates, self._batches = divmod(self._batches, getattr(optimizer, "gradient_accumulation_steps", None) or 1)
        if updates:
            facts = self.recorder.facts
            facts["samples_per_step"] = max(self._samples, facts.get("samples_per_step", 0))
            self._samples = 0
            if "gradient_bytes" not in facts:
                facts |= _facts(model, updates)
            self.recorder.step_done()
        self._ended = self.recorder.clock()

    def finish(self, result: Any) -> None:
        """Wait until the step has been computed."""

    def _timed(self, batches: Any) -> Any:
        """Return `batches` with the wait for each timed; a batch, and TensorFlow's own iterators, as they are."""
        if not isinstance(batches, Iterator) or hasattr(batches, "get_next"):
            self._see(batches)
            return batches

        def each() -> Iterator[Any]:
            while True:
                began = self.recorder.clock()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                self.recorder.waited_for_data(self.recorder.clock() - began)
                self._see(batch)
                yield batch

        return each()

    def _see(self, batch: Any) -> None:
        shapes = [leaf.shape for leaf in keras.tree.flatten(batch) if getattr(leaf, "shape", None)]
        if shapes:
            self._samples += int(shapes[0][0])


class _TorchMarks(_Marks):
    def finish(self, result: Any) -> None:
        from hvdtrain.torch.step_marks import finish_gpu

        finish_gpu()


class _JaxMarks(_Marks):
    reduction = "_reduce_on_host"

    def finish(self, result: Any) -> None:
        import jax

        # Without this, a step would seem to end when it was handed over.
        jax.block_until_ready(result)


class _TensorFlowMarks(_Marks):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._wall_ended = time.time()
        recorder.facts["clock"] = "TensorFlow's graph"

    @functools.cached_property
    def _noted(self) -> _Noted:
        # Not at once: a variable starts TensorFlow's runtime, which has to be told of this rank's GPU before.
        return _Noted()

    def on_batch(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `train_step`, which first notes when its batch is there."""
        import tensorflow as tf

        @functools.wraps(train_step)
        def marked(data: Any) -> Any:
            leaves = [leaf for leaf in keras.tree.flatten(data) if isinstance(leaf, tf.Tensor)]
            with tf.control_dependencies(leaves):
                # The first one, where Keras takes several steps in a call.
                first = tf.equal(self._noted.batch_at, 0.0)
                noted = self._noted.batch_at.assign(tf.where(first, tf.timestamp(), self._noted.batch_at))
            if leaves and leaves[0].shape.rank:
                self._noted.samples.assign_add(tf.shape(leaves[0], tf.int64)[0])
            # The forward pass after the clock: TensorFlow may run what is ready in any order.
            with tf.control_dependencies([noted]):
                data = keras.tree.map_structure(lambda x: tf.identity(x) if isinstance(x, tf.Tensor) else x, data)
            return train_step(data)

        marker: Callable[..., Any] = tf.autograph.experimental.do_not_convert(marked)
        return marker

    def reducing(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        """Return `reduce`, between whose last input and last output the graph reads the clock."""
        import tensorflow as tf

        @functools.wraps(reduce)
        def measured(gradients: Any, *args: Any, **kwargs: Any) -> Any:
            with tf.control_dependencies(_dense(tf, gradients)):
                began = tf.timestamp()
            reduced = reduce(gradients, *args, **kwargs)
            with tf.control_dependencies([began, *_dense(tf, reduced)]):
                ended = tf.timestamp()
            self._noted.waited.assign_add(tf.maximum(ended - began, tf.zeros((), tf.float64)))
            return reduced

        timed: Callable[..., Any] = tf.autograph.experimental.do_not_convert(measured)
        return timed

    def stepping(self, model: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the train function, after which the graph's notes are read."""

        @functools.wraps(function)
        def step(iterator: Any) -> Any:
            in_graph = hasattr(iterator, "get_next")  # tf.data's own, as fit gives it
            if not in_graph:
                self.recorder.waited_for_data(self.recorder.clock() - self._ended)
            result = function(self._timed(iterator))
            # The variables may be read only now: the step is over.
            self.recorder.waited(float(self._noted.waited.numpy()))
            if in_graph:
                self.recorder.waited_for_data(float(self._noted.batch_at.numpy()) - self._wall_ended)
            self._samples += int(self._noted.samples.numpy())
            self._noted.reset()
            self.called(model)
            self._wall_ended = time.time()
            return result

        return step

    def _see(self, batch: Any) -> None:
        """Leave it to the graph, which sees every batch."""


class _Noted:
    """Variables into which the graph writes."""

    def __init__(self) -> None:
        import tensorflow as tf

        with tf.init_scope(), tf.device("/CPU:0"):
            self.waited = tf.Variable(0.0, dtype=tf.float64, trainable=False)  # seconds in this call
            self.batch_at = tf.Variable(0.0, dtype=tf.float64, trainable=False)  # seconds since 1970
            self.samples = tf.Variable(0, dtype=tf.int64, trainable=False)  # in this call

    def reset(self) -> None:
        """Forget the call."""
        self.waited.assign(0.0)
        self.batch_at.assign(0.0)
        self.samples.assign(0)


def _dense(tf: Any, tensors: Any) -> list[Any]:
    return [t.values if isinstance(t, tf.IndexedSlices) else t for t in tensors]


def _facts(model: Any, updates: int) -> dict[str, Any]:
    part = distributed_part(model.optimizer)
    how = part._hvd_how if part is not None else None
    return {
        "framework": f"keras/{keras.backend.backend()}",
        "gradient_bytes": updates * sum(_num_bytes(v) for v in model.trainable_variables),
        "reduced": bool(how is not None and how.active()),
        "wire": {None: "none", "float16": "fp16", "bfloat16": "bf16"}[how.compression.wire if how else None],
    }


def _num_bytes(variable: Any) -> int:
    bits = re.search(r"\d+$", keras.backend.standardize_dtype(variable.dtype))  # "float32", "bfloat16"
    return int(math.prod(variable.shape)) * (int(bits.group()) // 8 if bits else 1)
