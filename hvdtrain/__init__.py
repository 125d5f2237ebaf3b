"""Train a model on many GPUs with Horovod, whatever the framework.

Importing hvdtrain imports no framework and no Horovod; each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hvdtrain import quiet

if TYPE_CHECKING:
    from hvdtrain.data import Sharded as Sharded
    from hvdtrain.own_loop import prepare as prepare
    from hvdtrain.parquet import read_parquet as read_parquet
    from hvdtrain.runner.function import run as run
    from hvdtrain.trainer import History as History
    from hvdtrain.trainer import Trainer as Trainer
    from hvdtrain.world import SoloWorld as SoloWorld
    from hvdtrain.world import World as World
    from hvdtrain.world import init as init

__version__ = "0.1.0"

_HOMES = {
    "History": "trainer",
    "Sharded": "data",
    "SoloWorld": "world",
    "Trainer": "trainer",
    "World": "world",
    "init": "world",
    "prepare": "own_loop",
    "read_parquet": "parquet",
    "run": "runner.function",
}
_SUBMODULES = ("callbacks", "checkpoint", "data", "errors", "sampling", "trainer", "world")

__all__ = [
    "History",
    "Sharded",
    "SoloWorld",
    "Trainer",
    "World",
    "__version__",
    "init",
    "prepare",
    "read_parquet",
    "run",
]

quiet.begin()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"hvdtrain.{_HOMES[name]}"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"hvdtrain.{name}")
    raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES})
