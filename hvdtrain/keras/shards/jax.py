"""The sharded step on the JAX backend: parts are values within a step; the host gathers them."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from numpy.typing import NDArray

from hvdtrain.distributed.buckets import fill_in_order
from hvdtrain.distributed.division import Division
from hvdtrain.distributed.recorder import recorder
from hvdtrain.keras import basics, ops
from hvdtrain.keras.backends import jax as backend
from hvdtrain.keras.reduction import by_dtype
from hvdtrain.keras.shards import BUCKET_BYTES, Shards

Tensor = Any
Array = NDArray[Any]


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
    update([g.reshape(-1)[begin:end] for g, (begin, end) in zip(gradients, bounds, strict=True)], parts)
    shapes = [jax.ShapeDtypeStruct(v.shape, part.value.dtype) for v, part in zip(variables, parts, strict=True)]
    # The callback holds no traced value but its arguments: JAX may run it long after this trace is gone.
    wholes_of = functools.partial(_gather, division, shards.process_set, f"{optimizer._prefix}.weights", shapes)

    def gather(values: list[Tensor]) -> Any:
        return io_callback(wholes_of, shapes, *values, ordered=True)

    def unchanged(values: list[Tensor]) -> list[Tensor]:
        return [v.value for v in variables]

    wholes = backend.on_update_step(optimizer, gather, unchanged, [part.value for part in parts])
    for variable, whole in zip(variables, wholes, strict=True):
        variable.assign(whole)


@recorder.waiting()
def _gather(
    division: Division, process_set: Any, name: str, shapes: Sequence[jax.ShapeDtypeStruct], *parts: Any
) -> list[Array]:
    """Return whole weights of all ranks' parts."""
    arrays, found = [np.asarray(part) for part in parts], [np.empty(math.prod(s.shape), s.dtype) for s in shapes]
    large = [i for i, whole in enumerate(found) if division.is_broadcast(whole.size, whole.itemsize)]
    small = [i for i in range(len(found)) if i not in large]
    waits = [wait for i in large for wait in _broadcast(division, process_set, f"{name}.{i}", arrays[i], found[i])]
    _gather_small(division, process_set, name, [arrays[i] for i in small], [found[i] for i in small])
    for wait in waits:
        wait()
    return [whole.reshape(s.shape) for whole, s in zip(found, shapes, strict=True)]


def _broadcast(division: Division, process_set: Any, name: str, part: Array, whole: Array) -> list[Callable[[], Any]]:
    """Start to send each part of a weight from its rank, into the whole."""
    waits, ranks = [], getattr(process_set, "ranks", None) or range(division.size)
    for index, root in enumerate(ranks):
        begin, end = division.bounds(whole.size, index)
        if root == basics.rank():
            whole[begin:end] = part
        if begin < end:
            room = whole[begin:end].view(np.uint8)  # Horovod does not know bfloat16
            waits.append(ops.broadcast_in_place(room, root, name=f"{name}.{root}", process_set=process_set))
    return waits


def _gather_small(division: Division, process_set: Any, name: str, parts: list[Array], wholes: list[Array]) -> None:
    """Gather weights in buckets, of which two are in flight."""
    lengths = [division.length(whole.size) for whole in wholes]
    in_flight: deque[tuple[Sequence[int], Callable[[], Any]]] = deque()

    def put() -> None:
        bucket, wait = in_flight.popleft()
        rows = wait().view(parts[bucket[0]].dtype).reshape(division.size, -1)
        columns = np.split(rows, np.cumsum([lengths[i] for i in bucket])[:-1], axis=1)
        for i, column in zip(bucket, columns, strict=True):
            wholes[i][:] = column.reshape(-1)[: wholes[i].size]

    buckets = by_dtype(fill_in_order([w.nbytes for w in wholes], BUCKET_BYTES), [part.dtype.name for part in parts])
    for number, bucket in enumerate(buckets):
        if len(in_flight) == 2:
            put()
        sent = np.zeros(sum(lengths[i] for i in bucket), parts[bucket[0]].dtype)
        begins = np.cumsum([0, *(lengths[i] for i in bucket)])
        for begin, i in zip(begins, bucket, strict=False):
            sent[begin : begin + parts[i].size] = parts[i]
        wait = ops.begin("allgather", sent.view(np.uint8), name=f"{name}.bucket.{number}", process_set=process_set)
        in_flight.append((bucket, wait))
    while in_flight:
        put()
