"""Train a model on many GPUs with Horovod, whatever the framework.

Importing hvdtrain imports no framework and no Horovod; each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hvdtrain.system import log_filter, old_names, whole_lines

if TYPE_CHECKING:
    from hvdtrain.adapter import Loss
    from hvdtrain.data.parquet import read_parquet
    from hvdtrain.data.sources import Sharded
    from hvdtrain.distributed.compression import Int8, PowerSGD, TopK
    from hvdtrain.distributed.world import SoloWorld, World, init
    from hvdtrain.launch.function import run
    from hvdtrain.sync.delayed import Delayed
    from hvdtrain.sync.diloco import DiLoCo
    from hvdtrain.sync.local_sgd import LocalSGD
    from hvdtrain.training.custom_loop import prepare
    from hvdtrain.training.progress import History
    from hvdtrain.training.trainer import Trainer

__version__ = "0.1.0"

_HOMES = {
    "Delayed": "sync.delayed",
    "DiLoCo": "sync.diloco",
    "History": "training.progress",
    "Int8": "distributed.compression",
    "LocalSGD": "sync.local_sgd",
    "Loss": "adapter",
    "PowerSGD": "distributed.compression",
    "Sharded": "data",
    "SoloWorld": "distributed.world",
    "TopK": "distributed.compression",
    "Trainer": "training.trainer",
    "World": "distributed.world",
    "init": "distributed.world",
    "prepare": "training.custom_loop",
    "read_parquet": "data.parquet",
    "run": "launch.function",
}
# Of these, `system.old_names` finds what has moved.
_SUBMODULES = ("callbacks", "checkpoint", "data", "errors", "sampling", "trainer", "world")

__all__ = [
    "Delayed", "DiLoCo", "History", "Int8", "LocalSGD", "Loss", "PowerSGD", "Sharded", "SoloWorld", "TopK", "Trainer",
    "World", "__version__", "init", "prepare", "read_parquet", "run",
]  # fmt: skip

log_filter.begin()
old_names.install()
whole_lines.begin()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"hvdtrain.{_HOMES[name]}"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"hvdtrain.{name}")
    raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES})
