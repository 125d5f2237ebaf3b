"""Collectives on host (numpy) arrays with everything Horovod offers: names, process sets, scale factors.

`World` has the few that the rest of hvdtrain needs; the drop-in names and the JAX backend need these. Both engines
have the same signatures, so only the two conversions differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from hvdtrain.keras import basics

Array = NDArray[Any]


def call(kind: str, array: Array, *args: Any, process_set: Any | None = None, **kwargs: Any) -> Array:
    """Run Horovod's collective `kind` ("allreduce", "allgather", ...) on `array`; its copy in one process.

    Args:
        kind: name of the function in `horovod.torch` and `horovod.tensorflow`.
        array: host array, of a dtype that Horovod takes.
        args: further positional arguments, such as the root rank.
        process_set: ranks that take part; None means all.
        kwargs: further keyword arguments, such as `op` and `name`.
    """
    module = basics.running()
    if module is None:
        return np.array(array)
    if process_set is not None:
        kwargs["process_set"] = process_set
    with _eagerly():
        return _from_tensor(getattr(module, kind)(_to_tensor(module, array), *args, **kwargs))


def allreduce_in_place(
    array: Array, *, name: str, process_set: Any | None = None, **kwargs: Any
) -> Callable[[], Array]:
    """Start to reduce `array`, which must be writeable and left alone; return what waits, and returns the result."""
    module: Any = basics.running()
    if module is None or basics.name() != "torch":
        result = call("allreduce", array, name=name, process_set=process_set, **kwargs)
        return lambda: result
    if process_set is not None:
        kwargs["process_set"] = process_set
    handle = module.allreduce_async_(_to_tensor(module, array), name=name, **kwargs)

    def wait() -> Array:
        module.synchronize(handle)
        return array

    return wait


def alltoall(array: Array, splits: Array, *, name: str, process_set: Any | None = None) -> tuple[Array, Array]:
    """Send `splits[r]` rows to each rank r; return the rows received, and how many came from each rank."""
    module: Any = basics.running()
    options = {} if process_set is None else {"process_set": process_set}
    with _eagerly():
        rows, received = module.alltoall(_to_tensor(module, array), _to_tensor(module, splits), name=name, **options)
        return _from_tensor(rows), _from_tensor(received)


def to_numpy(tensor: Any) -> Array:
    """Return a variable's or tensor's value as a host array."""
    value = tensor.value if isinstance(tensor, keras.Variable) else tensor
    if not hasattr(value, "detach"):
        return np.asarray(keras.ops.convert_to_numpy(value))
    # torch: Keras would ask the tensor for an array in a way that NumPy 2 deprecates.
    value = value.detach().cpu()
    if "bfloat16" not in str(value.dtype):
        return np.asarray(value.numpy())
    import ml_dtypes

    return np.asarray(value.float().numpy().astype(ml_dtypes.bfloat16))


def allgather_bytes(data: bytes, *, name: str, process_set: Any | None = None) -> list[bytes]:
    """Return every rank's `data`, in rank order; lengths may differ."""
    array = np.frombuffer(data, np.uint8)
    lengths = call("allgather", np.array([array.size], np.int64), name=f"{name}.length", process_set=process_set)
    gathered = call("allgather", array, name=f"{name}.bytes", process_set=process_set)
    ends = np.cumsum(lengths)
    return [gathered[end - n : end].tobytes() for n, end in zip(lengths, ends, strict=True)]


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    """Leave any graph that TensorFlow is tracing: the answer is needed now, and once."""
    if basics.name() == "torch":
        yield
        return
    import tensorflow as tf

    with tf.init_scope(), tf.device("/CPU:0"):
        yield


def _to_tensor(module: ModuleType, array: Array) -> Any:
    array = np.ascontiguousarray(array).reshape(np.shape(array))
    if module.__name__ == "horovod.torch":
        import torch

        return torch.from_numpy(array if array.flags.writeable else array.copy())
    import tensorflow as tf

    return tf.constant(array)


def _from_tensor(tensor: Any) -> Array:
    return np.array(tensor.numpy())
