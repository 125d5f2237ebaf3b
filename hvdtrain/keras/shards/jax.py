"""The sharded step on the JAX backend: parts are values within a step; the host gathers them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from hvdtrain.distributed.buckets import fill_in_order
from hvdtrain.distributed.division import Division
from hvdtrain.distributed.recorder import recorder
from hvdtrain.keras import basics, ops
from hvdtrain.keras.backends import host_calls
from hvdtrain.keras.backends import jax as backend
from hvdtrain.keras.reduction import GradientReduction, by_dtype
from hvdtrain.keras.shards import Shards

Tensor = Any
Array = NDArray[Any]

_BUCKET_BYTES = 2**23  # of weights that are gathered together


class _Part:
    """This rank's part of a variable, which an optimizer reads and assigns as it does variables."""

    def __init__(self, whole: Any, value: Tensor) -> None:
        self._hvd_whole, self.value, self.dtype, self.shape = whole, value, whole.dtype, value.shape

    def __jax_array__(self) -> Tensor:
        return self.value

    def assign(self, value: Tensor) -> None:
        """Replace the value."""
        self.value = value.astype(self.value.dtype)

    def assign_add(self, value: Tensor) -> None:
        """Add to the value."""
        self.assign(self.value + value)

    def assign_sub(self, value: Tensor) -> None:
        """Subtract from the value."""
        self.assign(self.value - value)


def part(gradient: Tensor, begin: int, end: int) -> Tensor:
    """Return these numbers of a gradient, in one dimension."""
    return gradient.reshape(-1)[begin:end]


def reduce(
    shards: Shards, gradients: list[Tensor], names: Sequence[str], variables: Sequence[Any], how: GradientReduction
) -> list[Tensor]:
    """Return this rank's parts of gradients, reduced over ranks; see `hvdtrain.keras.shards`."""
    wires = [how.compression.compress(g)[0] for g in gradients]
    bounds = [shards.bounds(w.size) for w in wires]
    shapes = [jax.ShapeDtypeStruct((end - begin,), w.dtype) for w, (begin, end) in zip(wires, bounds, strict=True)]
    buckets = backend.buckets_of(wires, variables, how)
    function = functools.partial(_reduce, shards.division, shards.rank, list(names), buckets, how)
    sums = host_calls.call(function, shapes, wires)
    # In the wire's type, as Horovod; XLA multiplies while it updates.
    factors = [1 if s.dtype == jnp.bfloat16 else jnp.asarray(how.sum_factor, s.dtype) for s in sums]
    return [(s * factor).astype(g.dtype) for s, factor, g in zip(sums, factors, gradients, strict=True)]


@recorder.waiting()
def _reduce(
    division: Division,
    rank: int,
    names: list[str],
    buckets: list[list[int]],
    how: GradientReduction,
    arrays: list[Array],
    results: list[Array],
) -> None:
    """Reduce this rank's parts of arrays. Two buckets are in flight."""

    def begin(bucket: list[int]) -> Callable[[], None]:
        bounds = division.of_ranks([arrays[i].size for i in bucket])
        pieces = [arrays[i][slice(*each)] for of_rank in bounds for i, each in zip(bucket, of_rank, strict=True)]
        vector = arrays[bucket[0]] if len(bucket) == 1 else np.concatenate(pieces)
        lengths = [sum(end - begin for begin, end in of_rank) for of_rank in bounds]
        part, counts, own = division.sent(lengths, rank)
        wait = _exchange(vector[part], counts, f"{names[bucket[0]]}.parts", how)

        def put() -> None:
            rows = list(wait().view(vector.dtype).reshape(division.size - (own is not None), lengths[rank]))
            if own is not None:
                rows.insert(rank, vector[own])
            ends = np.cumsum([results[i].size for i in bucket])
            for i, end in zip(bucket, ends, strict=True):
                _sum([row[end - results[i].size : end] for row in rows], how, results[i])

        return put

    ops.finish_in_turn(map(begin, buckets), at_once=2)


def _exchange(sent: Array, lengths: list[int], name: str, how: GradientReduction) -> Callable[[], Array]:
    """Start to send each rank its piece; return a function that waits for the pieces for this rank."""
    is_bf16 = sent.dtype == ml_dtypes.bfloat16  # which Horovod does not know
    splits = np.array(lengths, np.int32) * (2 if is_bf16 else 1)
    sent = sent.view(np.uint8) if is_bf16 else sent
    return ops.begin("alltoall", sent, splits=splits, name=name, process_set=how.process_set)


def _sum(rows: list[Array], how: GradientReduction, result: Array) -> None:
    """Put the sum of rows, of one from each rank, into an array; of bfloat16, the result of the reduction."""
    if result.dtype == ml_dtypes.bfloat16:
        result[:] = backend.mean_of_bf16(np.stack(rows), how)
        return
    first, *others = rows
    for row in others:
        np.add(first, row, out=result)
        first = result
    if not others:
        result[:] = first


def step(
    shards: Shards,
    optimizer: Any,
    update: Callable[[list[Any], list[Any]], None],
    gradients: list[Tensor],
    variables: list[Any],
) -> None:
    """Update this rank's parts of variables, and give all ranks all parts; see `hvdtrain.keras.shards`."""
    division = shards.division
    bounds = [shards.bounds(math.prod(v.shape)) for v in variables]
    parts = [_Part(v, v.value.reshape(-1)[begin:end]) for v, (begin, end) in zip(variables, bounds, strict=True)]
    update(gradients, parts)
    shapes = [jax.ShapeDtypeStruct(v.shape, part.value.dtype) for v, part in zip(variables, parts, strict=True)]
    function = functools.partial(_gather, division, shards.process_set, f"{optimizer._prefix}.weights")

    def gather(values: list[Tensor]) -> Any:
        return host_calls.call(function, shapes, values, rooms=[v.value for v in variables])

    def unchanged(values: list[Tensor]) -> list[Tensor]:
        return [v.value for v in variables]

    wholes = backend.on_update_step(optimizer, gather, unchanged, [part.value for part in parts])
    for variable, whole in zip(variables, wholes, strict=True):
        variable.assign(whole)


@recorder.waiting()
def _gather(division: Division, process_set: Any, name: str, parts: list[Array], wholes: list[Array]) -> None:
    """Put the parts of all ranks into whole weights."""
    large = [i for i, whole in enumerate(wholes) if division.is_broadcast(whole.size, whole.itemsize)]
    small = [i for i in range(len(wholes)) if i not in large]
    sends = (send for i in large for send in _broadcast(division, process_set, f"{name}.{i}", parts[i], wholes[i]))

    def gather_small() -> None:
        mine, rooms = [parts[i] for i in small], [wholes[i] for i in small]
        ops.finish_in_turn(_gather_small(division, process_set, name, mine, rooms), at_once=2)

    # Small weights, while large ones are on their way.
    ops.finish_in_turn(itertools.chain([gather_small], sends))


def _broadcast(
    division: Division, process_set: Any, name: str, part: Array, whole: Array
) -> Iterator[Callable[[], Any]]:
    """Start to send each part of a weight from its rank, into the whole."""
    ranks = getattr(process_set, "ranks", None) or range(division.size)
    for index, root in enumerate(ranks):
        begin, end = division.bounds(whole.size, index)
        if root == basics.rank():
            whole[begin:end] = part
        if begin < end:
            room = whole[begin:end].view(np.uint8)  # Horovod does not know bfloat16
            yield ops.broadcast_in_place(room, root, name=f"{name}.{root}", process_set=process_set)


def _gather_small(
    division: Division, process_set: Any, name: str, parts: list[Array], wholes: list[Array]
) -> Iterator[Callable[[], None]]:
    """Start to gather weights, in buckets."""
    lengths = [division.length(whole.size) for whole in wholes]

    def begin(number: int, bucket: Sequence[int]) -> Callable[[], None]:
        dtype, begins = parts[bucket[0]].dtype, np.cumsum([0, *(lengths[i] for i in bucket)])
        sent = np.zeros(begins[-1], dtype)
        for first, i in zip(begins, bucket, strict=False):
            sent[first : first + parts[i].size] = parts[i]
        wait = ops.begin("allgather", sent.view(np.uint8), name=f"{name}.bucket.{number}", process_set=process_set)

        def put() -> None:
            columns = np.split(wait().view(dtype).reshape(division.size, -1), begins[1:-1], axis=1)
            for i, column in zip(bucket, columns, strict=True):
                wholes[i][:] = column.reshape(-1)[: wholes[i].size]

        return put

    buckets = by_dtype(fill_in_order([w.nbytes for w in wholes], _BUCKET_BYTES), [part.dtype.name for part in parts])
    return itertools.starmap(begin, enumerate(buckets))
