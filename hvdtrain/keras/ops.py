"""Collectives on single values, under Horovod's names: eagerly on every backend, in TensorFlow's graphs natively."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np

from hvdtrain.keras import basics, host_collectives
from hvdtrain.keras.compression import Compression, resolve

__all__ = [
    "allgather", "allgather_object", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_object",
    "reducescatter",
]  # fmt: skip

# Horovod matches tensors by name. Every rank makes the same calls in the same order, so counting names them.
_calls = itertools.count()


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
    process_set: Any | None = None,
) -> Any:
    """Return the mean of `value` over ranks, or another reduction of it.

    Args:
        value: anything that becomes a tensor; shape and dtype equal on all ranks.
        name: equal on all ranks; counted if left out.
        average: Horovod's older way to say op=Average (True) or op=Sum (False).
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        compression: what travels in place of floats.
        process_set: ranks that take part; None means all.

    Returns:
        A tensor of Keras's backend, of the shape and dtype of `value`.

    Raises:
        ValueError: both `average` and `op` are given.
    """
    if average is not None and op is not None:
        raise ValueError(f"Give op or average, not both. Received: op={op}, average={average}")
    if op is None:
        op = basics.Sum if average is False else basics.Average
    tensor = keras.ops.convert_to_tensor(value)
    wire, back = resolve(compression).compress(tensor)
    if keras.backend.standardize_dtype(wire.dtype) == "bfloat16":  # which Horovod cannot add up
        wire = keras.ops.cast(wire, "float32")
    scales = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    result = _run("allreduce", wire, name=name, op=op, process_set=process_set, **scales)
    if basics.running() is None and prescale_factor * postscale_factor != 1.0:
        result = result * (prescale_factor * postscale_factor)
    return result if back is None else keras.ops.cast(result, back)


def allgather(value: Any, name: str | None = None, process_set: Any | None = None) -> Any:
    """Return the ranks' values, concatenated on axis 0, on which alone their lengths may differ."""
    return _run("allgather", keras.ops.convert_to_tensor(value), name=name, process_set=process_set)


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: Any | None = None) -> Any:
    """Return the value of rank `root_rank`; shape and dtype equal on all ranks."""
    return _run("broadcast", keras.ops.convert_to_tensor(value), root_rank, name=name, process_set=process_set)


def reducescatter(value: Any, name: str | None = None, op: int = basics.Average, process_set: Any | None = None) -> Any:
    """Return this rank's part, along axis 0, of the reduction of `value` over ranks."""
    return _run("reducescatter", keras.ops.convert_to_tensor(value), name=name, op=op, process_set=process_set)


def alltoall(value: Any, splits: Any = None, name: str | None = None, process_set: Any | None = None) -> Any:
    """Send rows of `value` to every rank and return the rows received; with `splits`, also how many from each.

    Args:
        value: axis 0 is cut into one piece a rank: equal ones, or of the lengths in `splits`.
        splits: rows for each rank, or None.
        name: equal on all ranks; counted if left out.
        process_set: ranks that take part; None means all.
    """
    tensor = keras.ops.convert_to_tensor(value)
    if splits is None:
        return _run("alltoall", tensor, name=name, process_set=process_set)
    lengths = np.asarray(keras.ops.convert_to_numpy(splits), np.int32)
    if basics.running() is None:
        return tensor, keras.ops.convert_to_tensor(lengths)
    return _run("alltoall", tensor, lengths, name=name, process_set=process_set)


def barrier(process_set: Any | None = None) -> None:
    """Return once every rank has called it."""
    host_collectives.call("allgather", np.zeros(1, np.uint8), name="hvdtrain.barrier", process_set=process_set)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any | None = None) -> Any:
    """Return the root's `obj`, anything that can be pickled, on every rank.

    Pickled bytes come from this run's own ranks, which run this program; nothing is read from disk.
    """
    module = basics.running()
    options = host_collectives.in_set(process_set)
    return obj if module is None else module.broadcast_object(obj, root_rank=root_rank, name=name, **options)


def allgather_object(obj: Any, name: str | None = None, process_set: Any | None = None) -> list[Any]:
    """Return every rank's `obj`, in rank order."""
    module = basics.running()
    options = host_collectives.in_set(process_set)
    return [obj] if module is None else list(module.allgather_object(obj, name=name, **options))


def _run(kind: str, tensor: Any, *args: Any, name: str | None, process_set: Any | None, **options: Any) -> Any:
    module = basics.running()
    if module is None:
        return tensor
    name = f"{name or f'hvdtrain.{next(_calls)}'}.{kind}"
    backend = keras.backend.backend()
    if backend == "tensorflow" and not hasattr(tensor, "numpy"):  # in a graph
        options |= host_collectives.in_set(process_set)
        return getattr(module, kind)(tensor, *args, name=name.replace(".", "_"), **options)
    if backend == "jax":
        import jax

        if isinstance(tensor, jax.core.Tracer):
            raise TypeError(
                f"hvd.{kind} needs a concrete array and was called while JAX traces. Call it outside of jit, or let "
                "DistributedOptimizer reduce the gradients."
            )
    array = keras.ops.convert_to_numpy(tensor)
    result = host_collectives.call(kind, array, *args, name=name, process_set=process_set, **options)
    return keras.tree.map_structure(keras.ops.convert_to_tensor, result)
