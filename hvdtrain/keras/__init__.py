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

_OF_PROCESS_SETS = ("ProcessSet", "global_process_set")  # Horovod's own where it is installed: this loads it

__all__ = [
    "Compression", "DistributedOptimizer", "PartialDistributedOptimizer", "broadcast_global_variables",
    "broadcast_model", "broadcast_variables", "callbacks", "distribute_model", "distributed_part", "load_model",
]  # fmt: skip
__all__ += basics.__all__
__all__ += ops.__all__
__all__ += [*_OF_PROCESS_SETS, "elastic"]


def __getattr__(name: str) -> Any:
    if name == "elastic":
        return importlib.import_module("hvdtrain.keras.elastic")
    if name in _OF_PROCESS_SETS:
        return getattr(basics.process_sets(), name)
    raise AttributeError(f"module 'hvdtrain.keras' has no attribute {name!r}")


if "HVDTRAIN_STEP_TIMES" in os.environ:  # `hvdtrain bench --script`
    from hvdtrain.keras import step_marks
    from hvdtrain.telemetry.step_times import from_environment

    step_marks.attach(from_environment())
