"""horovod.torch's names without its defects: `import hvdtrain.torch as hvd`. Without Horovod, for one process."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from hvdtrain.torch.ops.compression import Compression
from hvdtrain.torch.ops.engine import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    after_init,
    init,
    module,
    poll,
    shutdown,
    synchronize,
)
from hvdtrain.torch.ops.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvdtrain.torch.ops.gather_ops import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from hvdtrain.torch.ops.reduce_ops import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    join,
    sparse_allreduce_async,
)
from hvdtrain.torch.ops.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from hvdtrain.torch.reduction.optimizer import DistributedOptimizer

# What the engine itself answers, when first used: this module can be imported where there is no Horovod.
_ENGINE_NAMES = (
    "HorovodInternalError", "ProcessSet", "add_process_set", "ccl_built", "check_extension", "cross_rank",
    "cross_size", "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled", "is_homogeneous",
    "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_lib_v2", "mpi_threads_supported",
    "nccl_built", "rank", "remove_process_set", "rocm_built", "size", "start_timeline", "stop_timeline",
)  # fmt: skip
_AFTER_INIT = (
    "add_process_set", "cross_rank", "cross_size", "is_homogeneous", "local_rank", "local_size",
    "mpi_threads_supported", "rank", "remove_process_set", "size", "start_timeline", "stop_timeline",
)  # fmt: skip
_SUBMODULES = ("compression", "elastic", "functions", "grid", "mpi_ops", "optimizer", "sync_batch_norm")
sys.modules[f"{__name__}.mpi_ops"] = sys.modules[__name__]  # for scripts that import from horovod.torch.mpi_ops

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "Max", "Min", "Product", "Sum", "SyncBatchNorm",
    "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async",
    "broadcast_async_", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters",
    "convert_sync_batchnorm", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async",
    "init", "join", "poll", "reducescatter", "reducescatter_async", "shutdown", "sparse_allreduce_async",
    "synchronize",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"hvdtrain.torch.{name}")
    if name == "Grid":  # it imports torch's tools for models in parts, which take half a second
        return importlib.import_module("hvdtrain.torch.grid").Grid
    if name in _ENGINE_NAMES:
        for home in (module(), sys.modules.get(f"{module().__name__}.mpi_ops")):
            if hasattr(home, name):
                return after_init(getattr(home, name)) if name in _AFTER_INIT else getattr(home, name)
        raise AttributeError(f"hvdtrain.torch.{name} is part of Horovod's build, which is not installed.")
    raise AttributeError(f"module 'hvdtrain.torch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "Grid", *_ENGINE_NAMES, *_SUBMODULES})


if "HVDTRAIN_STEP_TIMES" in os.environ:  # `hvdtrain bench --script`
    from hvdtrain.telemetry.step_times import from_environment
    from hvdtrain.torch import step_marks

    step_marks.attach(from_environment())
