"""Horovod for TensorFlow loops with a tape: `import hvdtrain.tensorflow as hvd` in place of horovod.tensorflow.

The same names and meanings, for tf.Variables and for the variables of Keras 3, eagerly and in a tf.function. Without
Horovod installed, one process gives the same numbers.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from keras import config as _config

if _config.backend() != "tensorflow":
    raise ImportError(
        f"hvdtrain.tensorflow needs Keras's TensorFlow backend. Received: KERAS_BACKEND={_config.backend()!r}. "
        "Set KERAS_BACKEND=tensorflow, or use hvdtrain.keras."
    )

from hvdtrain import keras
from hvdtrain.keras import basics
from hvdtrain.keras.basics import *
from hvdtrain.keras.reduction import Compression
from hvdtrain.tensorflow import ops
from hvdtrain.tensorflow.ops import *
from hvdtrain.tensorflow.optimizer import DistributedOptimizer
from hvdtrain.tensorflow.sync_batch_norm import SyncBatchNormalization
from hvdtrain.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from hvdtrain.tensorflow.variables import broadcast_, broadcast_global_variables, broadcast_variables

_OF_PROCESS_SETS = ("ProcessSet", "global_process_set")  # Horovod's own where it is installed: this loads it
# Helpers that Horovod's module happens to show. They are its own, so they need Horovod installed.
_HOROVODS_OWN = (
    "LocalGradientAggregationHelper", "_executing_eagerly", "check_extension", "check_num_rank_power_of_2",
    "gpu_available", "gradient_aggregation", "handle_average_backwards_compatibility", "refs_to_vars", "split_list",
    "util", "vars_to_refs",
)  # fmt: skip
# Modules that scripts import names from; `keras` for `import horovod.tensorflow.keras as hvd`.
for _name in ("compression", "functions", "mpi_ops"):
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = sys.modules[__name__]
sys.modules[f"{__name__}.keras"] = keras

__all__ = [
    "Compression", "DistributedGradientTape", "DistributedOptimizer", "PartialDistributedGradientTape",
    "SyncBatchNormalization", "broadcast_", "broadcast_global_variables", "broadcast_variables",
]  # fmt: skip
__all__ += basics.__all__
__all__ += ops.__all__
__all__ += [*_OF_PROCESS_SETS, "elastic"]


def __getattr__(name: str) -> Any:
    if name == "elastic":
        return importlib.import_module("hvdtrain.tensorflow.elastic")
    if name in _OF_PROCESS_SETS:
        return getattr(basics.process_sets(), name)
    if name in _HOROVODS_OWN:
        engine = basics.engine()
        if engine is None:
            raise AttributeError(f"hvdtrain.tensorflow.{name} is Horovod's own, and Horovod is not installed.")
        return getattr(engine, name)
    raise AttributeError(f"module 'hvdtrain.tensorflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_HOROVODS_OWN})
