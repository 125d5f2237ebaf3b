"""The sharded step on the TensorFlow backend: parts are variables, which hold their values within a step only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.keras.backends import tensorflow as backend
from hvdtrain.keras.reduction import GradientReduction, by_dtype, small_together
from hvdtrain.keras.shards import Shards

Tensor = Any


def part(gradient: Tensor, begin: int, end: int) -> Tensor:
    """Return these numbers of a gradient, in one dimension; an embedding's rows become a whole gradient."""
    return tf.reshape(tf.convert_to_tensor(gradient), [-1])[begin:end]


def reduce(
    shards: Shards, gradients: list[Tensor], names: Sequence[str], variables: Sequence[Any], how: GradientReduction
) -> list[Tensor]:
    """Return this rank's parts of gradients, reduced over ranks; see `hvdtrain.keras.shards`."""
    return backend.watched(lambda: _reduce(shards, gradients, names, variables, how), gradients, lambda: tuple(names))


def _reduce(
    shards: Shards, gradients: list[Tensor], names: Sequence[str], variables: Sequence[Any], how: GradientReduction
) -> list[Tensor]:
    found: list[Tensor] = [None] * len(gradients)
    wires: dict[int, Tensor] = {}
    for i, (gradient, name, variable) in enumerate(zip(gradients, names, variables, strict=True)):
        numel = math.prod(variable.shape)
        if isinstance(gradient, tf.IndexedSlices) and not how.sparse_as_dense:  # its rows are fewer bytes
            found[i] = part(backend.reduce_sparse(gradient, name, how), *shards.bounds(numel))
        else:
            wires[i] = how.compression.compress(tf.reshape(tf.convert_to_tensor(gradient), [numel]))[0]
    for bucket in _buckets(wires):
        bounds = shards.division.of_ranks([wires[i].shape[0] for i in bucket])
        pieces = _for_ranks([wires[i] for i in bucket], bounds)
        of_ranks = [sum(end - begin for begin, end in each) for each in bounds]
        total = backend.sum_of_parts(pieces, of_ranks, names[bucket[0]], shards.division, how)
        lengths = [end - begin for begin, end in bounds[shards.rank]]
        for i, piece in zip(bucket, tf.split(total, lengths), strict=True):
            found[i] = tf.cast(piece, gradients[i].dtype)
    return found


def _buckets(wires: dict[int, Tensor]) -> list[list[int]]:
    positions = list(wires)
    buckets = small_together([wire.shape[0] * wire.dtype.size for wire in wires.values()])
    return [[positions[i] for i in each] for each in by_dtype(buckets, [w.dtype.name for w in wires.values()])]


def _for_ranks(vectors: list[Tensor], bounds: list[list[tuple[int, int]]]) -> Tensor:
    """Return vectors in one: the first rank's part of each, then the second rank's."""
    if len(vectors) == 1:
        return vectors[0]
    return tf.concat([v[slice(*each)] for of_rank in bounds for v, each in zip(vectors, of_rank, strict=True)], axis=0)


def step(
    shards: Shards,
    optimizer: Any,
    update: Callable[[list[Any], list[Any]], None],
    gradients: list[Tensor],
    variables: list[Any],
) -> None:
    """Update this rank's parts of variables, and give all ranks all parts; see `hvdtrain.keras.shards`."""
    weights = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    parts = [_part_of(shards, weight) for weight in weights]
    for mine, weight in zip(parts, weights, strict=True):
        mine.assign(part(weight.read_value(), *shards.bounds(weight.shape.num_elements())), read_value=False)
    update(gradients, parts)
    values = [mine.read_value() for mine in parts]
    for mine in parts:
        mine.assign(tf.zeros([0], mine.dtype), read_value=False)
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
    for number, bucket in enumerate(by_dtype(small_together(nbytes), [weight.dtype.name for weight in weights])):
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
