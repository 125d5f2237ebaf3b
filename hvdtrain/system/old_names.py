"""Modules that users may import by the name that they had before they moved."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "hvdtrain.interval": "hvdtrain.telemetry.interval",
    "hvdtrain.loop": "hvdtrain.training.loop",
    "hvdtrain.own_loop": "hvdtrain.training.custom_loop",
    "hvdtrain.parquet": "hvdtrain.data.parquet",
    "hvdtrain.preemption": "hvdtrain.training.preemption",
    "hvdtrain.sampling": "hvdtrain.data.sharding",
    "hvdtrain.trainer": "hvdtrain.training.trainer",
    "hvdtrain.world": "hvdtrain.distributed.world",
}


class _Loader:  # importlib.abc is not imported: it takes 10 ms
    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put the old name's there


class _OldNamesFinder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = MOVED.get(fullname)
        if name is None:
            return None
        loader: Any = _Loader(name)
        return ModuleSpec(fullname, loader)


def install() -> None:
    """Let an old name stand for the same module object as the new one."""
    if not any(isinstance(each, _OldNamesFinder) for each in sys.meta_path):
        sys.meta_path.append(_OldNamesFinder())
