"""Marks around a step's reductions in a TensorFlow graph.

By two counters `hvdtrain.distributed.watchdog` sees a rank wait there; `hvdtrain.distributed.recorder`
reads for how long from a sum of seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.distributed.recorder import recorder
from hvdtrain.distributed.watchdog import waits

_variables: dict[str, tuple[Any, Any, Any]] = {}


def marked(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Return `reduce(gradients, names, ...)`, whose waits are seen and recorded, in graphs and eagerly."""

    @functools.wraps(reduce)
    def measured(gradients: Sequence[Any], names: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():  # a thread that waits there can be seen from outside
            with recorder.waiting():
                return reduce(gradients, names, *args, **kwargs)
        began, ended, seconds = _variables_of(names)
        # Begun once the first gradient is there: backward makes the last layer's first.
        with tf.control_dependencies(_dense(gradients[-1:])):
            counted = began.assign_add(1, read_value=False)
        with tf.control_dependencies(_dense(gradients)):
            ready = tf.timestamp()
        reduced = reduce(gradients, names, *args, **kwargs)
        with tf.control_dependencies([counted, ready, *_dense(reduced)]):
            ended.assign(began.read_value(), read_value=False)
            seconds.assign_add(tf.timestamp() - ready, read_value=False)
        return reduced

    return measured


def _variables_of(names: Sequence[str]) -> tuple[Any, Any, Any]:
    """Return the variables of the reduction that begins with names[0], the same for every trace of it."""
    if names[0] not in _variables:
        with tf.init_scope(), tf.device("/CPU:0"):
            began, ended = (tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(2))
            seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        _variables[names[0]] = began, ended, seconds
        waits.note_graph(names, lambda: (int(began.numpy()), int(ended.numpy())))
        recorder.note_graph(lambda: float(seconds.numpy()))
    return _variables[names[0]]


def _dense(tensors: Sequence[Any]) -> list[Any]:
    return [t.values if isinstance(t, tf.IndexedSlices) else t for t in tensors]
