"""Collectives on host (numpy) arrays with everything Horovod offers: names, process sets, scale factors.

`World` has the few that the rest of hvdtrain needs; the drop-in names and the JAX backend need these. Both engines
have the same signatures, so only the conversions differ.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.keras import basics

Array = NDArray[Any]


def call(kind: str, array: Array, *args: Any, process_set: Any | None = None, **options: Any) -> Any:
    """Return what Horovod's function `kind` makes of `array`: a host array, or two where it returns two tensors.

    In one process without Horovod that is a copy of `array`.
    """
    module = basics.running()
    if module is None:
        return np.array(array)
    return run(module, kind, array, *args, **in_set(process_set), **options)


def run(module: ModuleType, kind: str, array: Array, *args: Any, **options: Any) -> Any:
    """Run `call`'s collective with the Horovod of `module`."""
    function = getattr(module, kind)
    if module.__name__ == "horovod.torch":
        result = function(_torch_tensor(array), *args, **options)
    else:
        import tensorflow as tf

        # Outside of any graph that TensorFlow is tracing: the answer is needed now, and once.
        with tf.init_scope(), tf.device("/CPU:0"):
            result = function(tf.constant(array), *args, **options)
    return tuple(np.array(r.numpy()) for r in result) if isinstance(result, tuple) else np.array(result.numpy())


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

    def wait() -> Array:
        module.synchronize(handle)
        return array

    return wait


def _torch_tensor(array: Array) -> Any:
    import torch

    return torch.from_numpy(np.require(array, requirements=("C", "W")))
