"""Modules that users may import by the name that they had before they moved."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "hvdtrain.callbacks.context": "hvdtrain.callbacks.base",
    **{
        f"hvdtrain.callbacks.loggers.{name}": "hvdtrain.callbacks.loggers.tools"
        for name in ("csv_file", "mlflow", "tensorboard", "wandb")
    },
    "hvdtrain.interval": "hvdtrain.telemetry.interval",
    "hvdtrain.keras.compression": "hvdtrain.keras.reduction",
    "hvdtrain.keras.saving": "hvdtrain.keras.wrapping",
    "hvdtrain.loop": "hvdtrain.training.loop",
    "hvdtrain.own_loop": "hvdtrain.training.custom_loop",
    "hvdtrain.parquet": "hvdtrain.data.parquet",
    "hvdtrain.preemption": "hvdtrain.training.preemption",
    "hvdtrain.sampling": "hvdtrain.data.sharding",
    "hvdtrain.torch.handles": "hvdtrain.torch.ops.engine",
    "hvdtrain.torch.optimizer": "hvdtrain.torch.reduction.optimizer",
    **{
        f"hvdtrain.torch.{name}": f"hvdtrain.torch.ops.{name}"
        for name in ("compression", "engine", "functions", "gather_ops", "reduce_ops", "sync_batch_norm")
    },
    "hvdtrain.trainer": "hvdtrain.training.trainer",
    "hvdtrain.world": "hvdtrain.distributed.world",
}


class _OldNamesFinder:  # importlib.abc is not imported: it takes 10 ms
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        loader: Any = self
        return ModuleSpec(name, loader) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(MOVED[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:  # the old name's: the import system has put it there
            module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Let an old name stand for the same module object as the new one."""
    sys.meta_path.append(_OldNamesFinder())
