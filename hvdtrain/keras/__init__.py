"""Horovod for Keras 3: `import hvdtrain.keras as hvd` in place of horovod.keras or horovod.tensorflow.keras.

The same names and meanings, on Keras's TensorFlow, torch and JAX backends. Without Horovod installed, one process
gives the same numbers.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from hvdtrain.keras import callbacks, process_sets
from hvdtrain.keras.basics import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from hvdtrain.keras.compression import Compression
from hvdtrain.keras.ops import (
    allgather,
    allgather_object,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_object,
    reducescatter,
)
from hvdtrain.keras.optimizer import distributed_part
from hvdtrain.keras.process_sets import add_process_set, remove_process_set
from hvdtrain.keras.saving import distribute_model, load_model
from hvdtrain.keras.variables import broadcast_global_variables, broadcast_model, broadcast_variables
from hvdtrain.keras.wrapping import DistributedOptimizer, PartialDistributedOptimizer

if TYPE_CHECKING:
    from hvdtrain.keras import elastic as elastic

    ProcessSet: Any
    global_process_set: Any

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_model",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "distribute_model",
    "distributed_part",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> Any:
    # These are Horovod's own classes and objects where it is installed, and asking for them loads it.
    if name == "elastic":
        return importlib.import_module("hvdtrain.keras.elastic")
    if name in ("ProcessSet", "global_process_set"):
        return getattr(process_sets.module(), name)
    raise AttributeError(f"module 'hvdtrain.keras' has no attribute {name!r}")


if "HVDTRAIN_STEP_TIMES" in os.environ:  # `hvdtrain bench --script`
    from hvdtrain.keras import step_marks
    from hvdtrain.telemetry.step_times import from_environment

    step_marks.attach(from_environment())
