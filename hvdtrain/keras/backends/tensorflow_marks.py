"""Two counters around a step's reductions in a TensorFlow graph, by which `hvdtrain.watch` sees a rank wait there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.watch import waits

_counters: dict[str, tuple[Any, Any]] = {}


def begin(gradients: Sequence[Any], names: Sequence[str]) -> Any:
    """Count a reduction as begun once the first gradient is there; return what `end` needs, None outside of graphs."""
    if tf.executing_eagerly():  # a thread that waits there can be seen from outside
        return None
    began, ended = _counters_of(names)
    first = gradients[-1]  # backward makes the last layer's first
    with tf.control_dependencies([first.values if isinstance(first, tf.IndexedSlices) else first]):
        return began.assign_add(1, read_value=False), began, ended


def end(reduced: Sequence[Any], mark: Any) -> None:
    """Count the reduction as ended once all of `reduced` are there."""
    if mark is None:
        return
    counted, began, ended = mark
    with tf.control_dependencies([counted, *(r.values if isinstance(r, tf.IndexedSlices) else r for r in reduced)]):
        ended.assign(began.read_value(), read_value=False)


def _counters_of(names: Sequence[str]) -> tuple[Any, Any]:
    """Return the counters of the reduction that begins with names[0], the same for every trace of it."""
    if names[0] not in _counters:
        with tf.init_scope(), tf.device("/CPU:0"):
            began, ended = (tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(2))
        _counters[names[0]] = began, ended
        waits.note_graph(names, lambda: (int(began.numpy()), int(ended.numpy())))
    return _counters[names[0]]
