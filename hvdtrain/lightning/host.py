"""Lightning's names that no documentation promises, and without which the strategies would train other numbers."""

from __future__ import annotations

import logging
from typing import Any

import lightning

from hvdtrain.errors import HvdTrainError

log = logging.getLogger("hvdtrain")

TESTED = "2.6"
_ANOTHER = (
    "This version of Lightning is built in another way than those on which hvdtrain.lightning was tested. Received: "
    f"lightning {lightning.__version__}, without %s. Run: pip install 'lightning=={TESTED}.*'"
)

try:
    from lightning.fabric import fabric
    from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper, _InfiniteBarrier
    from lightning.pytorch.core.optimizer import _MockOptimizer
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.trainer.connectors.logger_connector.result import (
        _Metadata,
        _ResultCollection,
        _ResultMetric,
    )
except ImportError as error:
    raise HvdTrainError(_ANOTHER % error) from error

__all__ = [
    "DistributedSamplerWrapper",
    "_BackwardSyncControl",
    "_InfiniteBarrier",
    "_MockOptimizer",
    "_ResultCollection",
    "_ResultMetric",
    "check",
    "fabric",
    "require",
]


def check() -> None:
    """Raise HvdTrainError if this version's classes lack what the strategies override or read."""
    require(
        ParallelStrategy, "_configure_launcher", "_setup_model", "setup", "block_backward_sync", "process_dataloader"
    )
    require(FabricStrategy, "_configure_launcher", "setup_module", "setup_optimizer", "process_dataloader")
    require(_ResultCollection, "update_metrics", "metrics", "reset", "valid_items")
    require(_ResultMetric, "compute")
    require(_Metadata, "forked_name", "is_mean_reduction", "is_sum_reduction", "is_max_reduction", "is_min_reduction")
    require(fabric, "_InfiniteBarrier")
    if not lightning.__version__.startswith(f"{TESTED}."):
        log.warning(
            "hvdtrain.lightning was tested with Lightning %s. Compare a short run with one process. Received: %s",
            TESTED,
            lightning.__version__,
        )


def require(owner: Any, *names: str) -> None:
    """Raise HvdTrainError if an object of Lightning's lacks one of these attributes."""
    if missing := [name for name in names if not hasattr(owner, name)]:
        where = getattr(owner, "__name__", type(owner).__name__)
        raise HvdTrainError(_ANOTHER % f"{where}.{missing[0]}")
