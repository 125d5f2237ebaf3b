"""Give every rank the root's variables, eagerly or as part of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.distributed import world
from hvdtrain.keras import variables as keras_variables
from hvdtrain.keras.backends.tensorflow import untraced
from hvdtrain.keras.reduction import GradientReduction, small_together
from hvdtrain.keras.variables import CHUNK_BYTES
from hvdtrain.tensorflow import ops


@untraced
def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, process_set: Any | None = None, inplace: bool = False
) -> Any:
    """Assign the root's values to `variables` on every rank, bit for bit, whatever their dtypes.

    In a tf.function the broadcast becomes part of the graph, and runs each time the graph does. Eagerly, ranks compare
    the variables first: if they differ, all ranks raise DesyncError.

    Args:
        variables: tf.Variables or Keras variables, the same on all ranks and in the same order.
        root_rank: rank whose values all ranks get.
        process_set: ranks that take part; None means all.
        inplace: Horovod's argument, for less memory; here at most 64 MiB are sent at once, with or without it.

    Returns:
        None; in a graph of TensorFlow 1, the operation to run.
    """
    plain = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    if tf.executing_eagerly():
        keras_variables.broadcast_variables(plain, root_rank, process_set)
        return None
    size = world.current().size
    if not 0 <= root_rank < size:
        raise ValueError(f"root_rank must be a rank in [0, {size}). Received: root_rank={root_rank}")
    if not plain or not GradientReduction(process_set=process_set).active():
        return tf.group()
    chunks = small_together([_num_bytes(v) for v in plain], limit=CHUNK_BYTES, room=CHUNK_BYTES)
    return tf.group(*(_broadcast([plain[i] for i in chunk], root_rank, process_set) for chunk in chunks))


@untraced
def broadcast_(
    variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: Any | None = None
) -> list[Any]:
    """Assign the root's values to `variables` and return them as tensors; see `broadcast_variables`."""
    plain = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    done = broadcast_variables(plain, root_rank, process_set)
    with tf.control_dependencies([] if done is None else [done]):
        return [v.read_value() for v in plain]  # tf.identity may return what a reference variable held before


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that broadcasts all variables of a TensorFlow 1 graph; eagerly, a RuntimeError."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "TensorFlow 2 has no global variables. Call hvd.broadcast_variables(variables, root_rank) with the "
            "variables of the model, and then with those of the optimizer."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def _broadcast(variables: list[Any], root_rank: int, process_set: Any | None) -> Any:
    # As bytes, so that integers, booleans, bfloat16 and NaNs all arrive as they were.
    parts = [tf.reshape(_as_bytes(v), [-1]) for v in variables]
    received = ops.broadcast(
        tf.concat(parts, axis=0),
        root_rank,
        "hvdtrain_broadcast_variables",
        ignore_name_scope=True,
        process_set=process_set,
    )
    values = tf.split(received, [tf.size(part) for part in parts])
    return tf.group(*(v.assign(_from_bytes(value, v)) for v, value in zip(variables, values, strict=True)))


def _num_bytes(variable: Any) -> int:
    # The base type: a reference variable of TensorFlow 1 says "float32_ref".
    count = variable.shape.num_elements()
    return CHUNK_BYTES if count is None else int(count * variable.dtype.base_dtype.size)


def _as_bytes(variable: Any) -> Any:
    value = tf.convert_to_tensor(variable)
    return tf.cast(value, tf.uint8) if value.dtype == tf.bool else tf.bitcast(value, tf.uint8)


def _from_bytes(data: Any, variable: Any) -> Any:
    dtype = variable.dtype.base_dtype
    if dtype == tf.bool:
        return tf.cast(tf.reshape(data, tf.shape(variable)), tf.bool)
    axes = [] if dtype.size == 1 else [[dtype.size]]
    return tf.bitcast(tf.reshape(data, tf.concat([tf.shape(variable), *axes], axis=0)), dtype)
