"""Collectives on single values, under Horovod's names: eagerly on every backend, in TensorFlow's graphs natively.

Below them are those on host (numpy) arrays. Unlike World's, they take Horovod's names, process sets and scale factors.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from hvdtrain.distributed import whole_factors
from hvdtrain.keras import basics
from hvdtrain.keras.reduction import Compression, without_memory

Array = NDArray[Any]

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
        average: Horovod's older way to say op=Average (True) or op=Sum (False); with `op`, a ValueError.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        compression: what travels in place of floats.
        process_set: ranks that take part; None means all.

    Returns:
        A tensor of Keras's backend, of the shape and dtype of `value`.
    """
    op = operation(op, average)
    wire, back = compressed(keras.ops.convert_to_tensor(value), compression)
    scales = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    result = _run("allreduce", wire, name=name, op=op, process_set=process_set, **scales)
    if basics.running() is None and prescale_factor * postscale_factor != 1.0:
        result = _scaled(_scaled(result, prescale_factor), postscale_factor)
    return result if back is None else keras.ops.cast(result, back)


def _scaled(tensor: Any, factor: float) -> Any:
    """Return `tensor` times `factor` in its own dtype, integers cut; exact where the factor is whole or 1/n."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if not keras.backend.is_int_dtype(dtype):
        return tensor * factor
    if divisor := whole_factors.divisor(factor):
        down = tensor // divisor
        # `//` rounds down, and integers are cut: towards 0.
        scaled = (
            down if dtype.startswith("u") else keras.ops.where((down < 0) & (down * divisor != tensor), down + 1, down)
        )
    elif (multiplier := whole_factors.multiplier(factor)) is not None:
        scaled = tensor * multiplier
    else:
        widest = "float32" if keras.config.backend() == "jax" else "float64"  # JAX has no float64 unless a flag is set
        scaled = keras.ops.cast(tensor, widest) * factor
    return keras.ops.cast(scaled, dtype)


def operation(op: int | None, average: bool | None) -> int:
    """Return the reduction that is meant by `op`, or by Horovod's older `average`; the default is Average."""
    if average is not None and op is not None:
        raise ValueError(f"Give op or average, not both. Received: op={op}, average={average}")
    if op is None:
        op = basics.Sum if average is False else basics.Average
    return op


def compressed(tensor: Any, compression: Any) -> tuple[Any, str | None]:
    """Return `tensor` as it is sent, and the dtype to cast the result to; None for its own."""
    wire, back = without_memory(compression).compress(tensor)
    # Horovod cannot add bfloat16 up: rounded to it, but sent as float32.
    if keras.backend.standardize_dtype(wire.dtype) == "bfloat16":
        wire = keras.ops.cast(wire, "float32")
    return wire, back


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
    call("allgather", np.zeros(1, np.uint8), name="hvdtrain.barrier", process_set=process_set)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any | None = None) -> Any:
    """Return the root's `obj`, anything that can be pickled, on every rank.

    Pickled bytes come from this run's own ranks, which run this program; nothing is read from disk.
    """
    refuse_graph("broadcast_object")
    module, options = basics.running(), {"name": name, **in_set(process_set)}
    return obj if module is None else module.broadcast_object(obj, root_rank=root_rank, **options)


def allgather_object(obj: Any, name: str | None = None, process_set: Any | None = None) -> list[Any]:
    """Return every rank's `obj`, in rank order."""
    refuse_graph("allgather_object")
    module, options = basics.running(), {"name": name, **in_set(process_set)}
    return [obj] if module is None else list(module.allgather_object(obj, **options))


def refuse_graph(name: str) -> None:
    """Raise RuntimeError in a graph that TensorFlow is tracing: there are no values that could be sent."""
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    if not tf.executing_eagerly():
        raise RuntimeError(
            f"hvd.{name} needs values, and a graph has none. Received: a call in a tf.function. Call it outside of "
            "the function; hvdtrain.tensorflow has broadcast_variables for graphs."
        )


def _run(kind: str, tensor: Any, *args: Any, name: str | None, process_set: Any | None, **options: Any) -> Any:
    module = basics.running()
    if module is None:
        return tensor
    name = f"{name or f'hvdtrain.{next(_calls)}'}.{kind}"
    if keras.backend.backend() == "tensorflow" and not hasattr(tensor, "numpy"):  # in a graph
        options |= in_set(process_set)
        return getattr(module, kind)(tensor, *args, name=name.replace(".", "_"), **options)
    if keras.backend.backend() == "jax":
        import jax

        if isinstance(tensor, jax.core.Tracer):
            raise TypeError(f"hvd.{kind} needs a concrete array, and JAX is tracing. Call it outside of jit.")
    array = keras.ops.convert_to_numpy(tensor)
    result = call(kind, array, *args, name=name, process_set=process_set, **options)
    return keras.tree.map_structure(keras.ops.convert_to_tensor, result)


def call(kind: str, array: Array, *args: Any, process_set: Any | None = None, **options: Any) -> Any:
    """Return what `run` does with this process's Horovod; without Horovod, a copy of `array`."""
    module, options = basics.running(), {**in_set(process_set), **options}
    return np.array(array) if module is None else run(module, kind, array, *args, **options)


def run(module: ModuleType, kind: str, array: Array, *args: Any, **options: Any) -> Any:
    """Return what Horovod's collective `kind` makes of `array`: a host array, or two where it returns two tensors."""
    function = getattr(module, kind)
    if module.__name__ == "horovod.torch":
        result = function(_torch_tensor(array), *args, **options)
    else:
        import tensorflow as tf

        # Outside of any graph that TensorFlow is tracing: the answer is needed now, and once.
        with tf.init_scope(), tf.device("/CPU:0"):
            result = function(tf.constant(array), *args, **options)
    # In the memory of the result, which nobody else has.
    return tuple(np.asarray(r.numpy()) for r in result) if isinstance(result, tuple) else np.asarray(result.numpy())


def in_set(process_set: Any | None) -> dict[str, Any]:
    """Return the `process_set` argument of Horovod's functions, left out where it is all ranks."""
    return {} if process_set is None else {"process_set": process_set}


def allreduce_in_place(array: Array, *, process_set: Any | None = None, **options: Any) -> Callable[[], Array]:
    """Start to reduce `array`, which must be writeable and not change; return a function that waits for the result."""
    module: Any = basics.running()
    if module is None or module.__name__ != "horovod.torch":
        result = call("allreduce", array, process_set=process_set, **options)
        return lambda: result
    handle = module.allreduce_async_(_torch_tensor(array), **in_set(process_set), **options)
    return lambda: module.synchronize(handle).numpy()


def broadcast_in_place(
    array: Array, root_rank: int, *, process_set: Any | None = None, **options: Any
) -> Callable[[], Any]:
    """Start to replace a contiguous, writeable array by the root's; return a function that waits until it is there."""
    module: Any = basics.running()
    if module is None or module.__name__ != "horovod.torch":
        array[...] = call("broadcast", array, root_rank, process_set=process_set, **options)
        return lambda: array
    handle = module.broadcast_async_(_torch_tensor(array), root_rank, **in_set(process_set), **options)
    return lambda: module.synchronize(handle)


def begin(kind: str, array: Array, *, process_set: Any | None = None, **options: Any) -> Callable[[], Array]:
    """Start a collective of one result on `array`, which may be overwritten; return a function that waits for it.

    Args:
        kind: "allreduce" for a mean or sum, "allgather" or "alltoall".
        array: on the host. It must not change, and for an allreduce not be used again.
        process_set: ranks that take part; None means all.
        options: of Horovod's function.
    """
    if kind == "allreduce":
        return allreduce_in_place(array, process_set=process_set, **options)
    module: Any = basics.running()
    if module is None or module.__name__ != "horovod.torch":
        result = _first(call(kind, array, process_set=process_set, **options))
        return lambda: result
    handle = getattr(module, f"{kind}_async")(_read_only(array), **in_set(process_set), **options)

    def wait() -> Array:
        return _first(module.synchronize(handle)).numpy()  # type: ignore[no-any-return]

    return wait


def finish_in_turn(started: Iterable[Callable[[], Any]], *, at_once: int | None = None) -> None:
    """Finish operations in their order. On an error, wait for those in flight first: they use this process's memory.

    Args:
        started: starts each operation as it comes to it, and yields a function that waits for it.
        at_once: so many are in flight at most; None: all.
    """
    in_flight: deque[Callable[[], Any]] = deque()
    try:
        for finish in started:
            in_flight.append(finish)
            if len(in_flight) == at_once:
                in_flight.popleft()()
        while in_flight:
            in_flight.popleft()()
    finally:
        for finish in in_flight:
            with suppress(BaseException):
                finish()


def _first(received: Any) -> Any:
    """Return what was received, without the counts that an alltoall also returns."""
    return received[0] if isinstance(received, tuple) else received


def _read_only(array: Array) -> Any:
    """Return a tensor of an array's memory, which is not written to."""
    import torch.utils.dlpack

    try:
        return torch.utils.dlpack.from_dlpack(np.require(array, requirements="C"))
    except BufferError:  # NumPy before 2.1
        return _torch_tensor(array)


def _torch_tensor(array: Array) -> Any:
    import torch

    return torch.from_numpy(np.require(array, requirements=("C", "W")))
