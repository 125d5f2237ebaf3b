"""DistributedOptimizer with horovod.tensorflow's arguments: for optimizers of Keras 3 and of tf.compat.v1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.keras import basics, ops, wrapping
from hvdtrain.keras.basics import Average
from hvdtrain.keras.reduction import Compression, without_memory


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: Any | None = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that reduces gradients over ranks before it applies them.

    Use it with a plain tf.GradientTape: a DistributedGradientTape has reduced the gradients already. Keras 3 optimizers
    become those of `hvdtrain.keras.DistributedOptimizer`, which describes the arguments. An optimizer of
    tf.compat.v1.train becomes Horovod's own; `use_locking` is for these alone.
    """
    how: dict[str, Any] = {
        "name": name, "device_dense": device_dense, "device_sparse": device_sparse, "sparse_as_dense": sparse_as_dense,
        "backward_passes_per_step": backward_passes_per_step, "op": op, "num_groups": num_groups, "groups": groups,
        "gradient_predivide_factor": gradient_predivide_factor, "scale_local_gradients": scale_local_gradients,
        "average_aggregated_gradients": average_aggregated_gradients, **ops.in_set(process_set),
    }  # fmt: skip
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return wrapping.DistributedOptimizer(optimizer, compression=compression, **how)
    module = basics.running()
    if module is None and backward_passes_per_step > 1:
        raise ValueError(
            "An optimizer of tf.compat.v1 needs Horovod for backward_passes_per_step > 1. Use a Keras optimizer. "
            f"Received: backward_passes_per_step={backward_passes_per_step}"
        )
    if module is None:
        return optimizer
    kind = without_memory(compression)
    if kind.wire == "bfloat16":
        raise ValueError("An optimizer of tf.compat.v1 takes Compression.none or .fp16. Received: Compression.bf16")
    theirs = module.Compression.fp16 if kind.wire == "float16" else module.Compression.none
    return module.DistributedOptimizer(optimizer, use_locking=use_locking, compression=theirs, **how)
