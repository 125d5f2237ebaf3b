"""The place of horovod.torch.mpi_ops, for scripts that import from there."""

from __future__ import annotations

from typing import Any

import hvdtrain.torch


def __getattr__(name: str) -> Any:
    return getattr(hvdtrain.torch, name)


def __dir__() -> list[str]:
    return dir(hvdtrain.torch)
