"""Horovod for Keras 3: `import hvdtrain.keras as hvd` in place of horovod.keras or horovod.tensorflow.keras.

The same names and meanings, on Keras's TensorFlow, torch and JAX backends. Without Horovod installed, one process
gives the same numbers.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from hvdtrain.keras import basics, callbacks, ops
from hvdtrain.keras.basics import *
from hvdtrain.keras.ops import *
from hvdtrain.keras.optimizer import distributed_part
from hvdtrain.keras.reduction import Compression
from hvdtrain.keras.variables import broadcast_global_variables, broadcast_model, broadcast_variables
from hvdtrain.keras.wrapping import DistributedOptimizer, PartialDistributedOptimizer, distribute_model, load_model

# Horovod's own classes and functions where it is installed. Asking for them loads it.
_OF_PROCESS_SETS = ("ProcessSet", "add_process_set", "global_process_set", "remove_process_set")
_OF_HOROVOD = (
    "ccl_built", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rocm_built", "start_timeline", "stop_timeline",
)  # fmt: skip

__all__ = [
    "Compression", "DistributedOptimizer", "PartialDistributedOptimizer", "broadcast_global_variables",
    "broadcast_model", "broadcast_variables", "callbacks", "distribute_model", "distributed_part", "load_model",
]  # fmt: skip
__all__ += basics.__all__
__all__ += ops.__all__
__all__ += [*_OF_PROCESS_SETS, *_OF_HOROVOD, "elastic"]


def __getattr__(name: str) -> Any:
    if name == "elastic":
        return importlib.import_module("hvdtrain.keras.elastic")
    if name in _OF_PROCESS_SETS:
        return getattr(basics.process_sets(), name)
    if name in _OF_HOROVOD:
        return getattr(basics.engine(), name, lambda *_, **__: False)  # one process has nothing built or enabled
    raise AttributeError(f"module 'hvdtrain.keras' has no attribute {name!r}")


if "HVDTRAIN_STEP_TIMES" in os.environ:  # `hvdtrain bench --script`
    from hvdtrain.keras import step_marks
    from hvdtrain.telemetry.step_times import from_environment

    step_marks.attach(from_environment())
