"""Marks around a step's reductions in a TensorFlow graph.

By two counters `hvdtrain.distributed.watchdog` sees a rank wait there; a sum of seconds tells
`hvdtrain.distributed.wait_time` for how long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.distributed import wait_time
from hvdtrain.distributed.watchdog import waits

_variables: dict[str, tuple[Any, Any, Any]] = {}


def begin(gradients: Sequence[Any], names: Sequence[str]) -> Any:
    """Count a reduction as begun once the first gradient is there; return what `end` needs, None outside of graphs."""
    if tf.executing_eagerly():  # a thread that waits there can be seen from outside
        return None
    began, ended, seconds = _variables_of(names)
    with tf.control_dependencies(_dense(gradients[-1:])):  # backward makes the last layer's first
        counted = began.assign_add(1, read_value=False)
    with tf.control_dependencies(_dense(gradients)):
        ready = tf.timestamp()
    return counted, ready, began, ended, seconds


def end(reduced: Sequence[Any], mark: Any) -> None:
    """Count the reduction as ended once all of `reduced` are there, and the time since all gradients were."""
    if mark is None:
        return
    counted, ready, began, ended, seconds = mark
    with tf.control_dependencies([counted, ready, *_dense(reduced)]):
        ended.assign(began.read_value(), read_value=False)
        seconds.assign_add(tf.timestamp() - ready, read_value=False)


def _variables_of(names: Sequence[str]) -> tuple[Any, Any, Any]:
    """Return the variables of the reduction that begins with names[0], the same for every trace of it."""
    if names[0] not in _variables:
        with tf.init_scope(), tf.device("/CPU:0"):
            began, ended = (tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(2))
            seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        _variables[names[0]] = began, ended, seconds
        waits.note_graph(names, lambda: (int(began.numpy()), int(ended.numpy())))
        wait_time.note_graph(lambda: float(seconds.numpy()))
    return _variables[names[0]]


def _dense(tensors: Sequence[Any]) -> list[Any]:
    return [t.values if isinstance(t, tf.IndexedSlices) else t for t in tensors]
