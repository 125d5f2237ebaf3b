"""The sharded step on the TensorFlow backend: parts are variables, which hold their values within a step only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed.buckets import fill_in_order
from hvdtrain.keras.backends import tensorflow as backend
from hvdtrain.keras.reduction import by_dtype
from hvdtrain.keras.shards import BUCKET_BYTES, Shards

Tensor = Any


def step(
    shards: Shards,
    optimizer: Any,
    update: Callable[[list[Any], list[Any]], None],
    gradients: list[Tensor],
    variables: list[Any],
) -> None:
    """Update this rank's parts of variables, and give all ranks all parts; see `hvdtrain.keras.shards`."""
    weights = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    bounds = [shards.bounds(w.shape.num_elements()) for w in weights]
    parts = [_part_of(shards, weight) for weight in weights]
    for part, weight, (begin, end) in zip(parts, weights, bounds, strict=True):
        part.assign(tf.reshape(weight.read_value(), [-1])[begin:end], read_value=False)
    # An embedding's rows become a whole gradient, of which this rank takes its part.
    flat = [tf.reshape(tf.convert_to_tensor(gradient), [-1]) for gradient in gradients]
    update([g[begin:end] for g, (begin, end) in zip(flat, bounds, strict=True)], parts)
    values = [part.read_value() for part in parts]
    for part in parts:
        part.assign(tf.zeros([0], part.dtype), read_value=False)
    name = f"{optimizer._prefix}.weights"
    wholes = backend.watched(lambda: _gather(shards, optimizer, values, weights, name), values, lambda: (name,))
    for weight, whole in zip(weights, wholes, strict=True):
        weight.assign(whole, read_value=False)


def _part_of(shards: Shards, weight: Any) -> Any:
    """Return the variable for this rank's part of a weight: TensorFlow's own update operations need one."""
    key = weight.ref()
    if key not in shards.held:
        part = backend.untracked(np.zeros(0), weight.dtype, shape=[None])
        part._hvd_whole = weight
        shards.held[key] = part
    return shards.held[key]


def _gather(shards: Shards, optimizer: Any, parts: Sequence[Tensor], weights: Sequence[Any], name: str) -> list[Tensor]:
    """Return whole weights of all ranks' parts."""
    division, how = shards.division, optimizer._hvd_how
    counts = [weight.shape.num_elements() for weight in weights]
    lengths = [division.length(count) for count in counts]
    found: list[Tensor] = [None] * len(weights)
    nbytes = [count * weight.dtype.size for count, weight in zip(counts, weights, strict=True)]
    buckets = fill_in_order(nbytes, BUCKET_BYTES)
    for number, bucket in enumerate(by_dtype(buckets, [weight.dtype.name for weight in weights])):
        sent = tf.concat([_padded(parts[i], shards.bounds(counts[i]), lengths[i]) for i in bucket], axis=0)
        received = backend.allgather(sent, f"{name}.{number}", how)
        rows = tf.reshape(received, [division.size, sum(lengths[i] for i in bucket)])
        for i, column in zip(bucket, tf.split(rows, [lengths[i] for i in bucket], axis=1), strict=True):
            found[i] = tf.reshape(tf.reshape(column, [-1])[: counts[i]], weights[i].shape)
    return found


def _padded(part: Tensor, bounds: tuple[int, int], length: int) -> Tensor:
    begin, end = bounds
    part = tf.ensure_shape(part, [end - begin])
    return tf.pad(part, [[0, length - (end - begin)]]) if end - begin < length else part
