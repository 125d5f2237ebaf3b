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

from hvdtrain.distributed.buckets import fill_in_order
from hvdtrain.distributed.division import Division
from hvdtrain.distributed.recorder import recorder
from hvdtrain.keras import ops
from hvdtrain.keras.backends import jax as backend
from hvdtrain.keras.reduction import by_dtype
from hvdtrain.keras.shards import BUCKET_BYTES, Shards

Tensor = Any


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
    dtypes = [shape.dtype.name for shape in shapes]
    buckets = by_dtype(fill_in_order([math.prod(s.shape) * s.dtype.itemsize for s in shapes], BUCKET_BYTES), dtypes)
    # The callback holds no traced value but its arguments: JAX may run it long after this trace is gone.
    name = f"{optimizer._prefix}.weights"
    on_host = functools.partial(_gather, division, shards.process_set, name, buckets, [s.shape for s in shapes])

    def gather(values: list[Tensor]) -> Any:
        return io_callback(on_host, shapes, *values, ordered=True)

    def unchanged(values: list[Tensor]) -> list[Tensor]:
        return [v.value for v in variables]

    wholes = backend.on_update_step(optimizer, gather, unchanged, [part.value for part in parts])
    for variable, whole in zip(variables, wholes, strict=True):
        variable.assign(whole)


@recorder.waiting()
def _gather(
    division: Division,
    process_set: Any,
    name: str,
    buckets: Sequence[Sequence[int]],
    shapes: Sequence[tuple[int, ...]],
    *parts: Any,
) -> list[Any]:
    """Return whole weights of all ranks' parts, gathered in buckets, of which two are in flight."""
    lengths = [division.length(math.prod(shape)) for shape in shapes]
    found: list[Any] = [None] * len(parts)
    in_flight: deque[tuple[Sequence[int], Callable[[], Any]]] = deque()

    def put() -> None:
        bucket, wait = in_flight.popleft()
        rows = wait().view(np.asarray(parts[bucket[0]]).dtype).reshape(division.size, -1)
        columns = np.split(rows, np.cumsum([lengths[i] for i in bucket])[:-1], axis=1)
        for i, column in zip(bucket, columns, strict=True):
            found[i] = column.reshape(-1)[: math.prod(shapes[i])].reshape(shapes[i])

    for number, bucket in enumerate(buckets):
        if len(in_flight) == 2:
            put()
        arrays = [np.asarray(parts[i]) for i in bucket]
        sent = np.zeros(sum(lengths[i] for i in bucket), arrays[0].dtype)
        begins = np.cumsum([0, *(lengths[i] for i in bucket)])
        for begin, array in zip(begins, arrays, strict=False):
            sent[begin : begin + array.size] = array
        # As bytes: Horovod does not know bfloat16.
        wait = ops.begin("allgather", sent.view(np.uint8), name=f"{name}.{number}", process_set=process_set)
        in_flight.append((bucket, wait))
    while in_flight:
        put()
    return found
