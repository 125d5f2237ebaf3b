"""Train with Lightning on Horovod's ranks: `Trainer(strategy="horovod")`, `Fabric(strategy="horovod")`."""

from __future__ import annotations

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry
except ImportError as error:
    from hvdtrain.errors import PackageMissingError

    raise PackageMissingError(f"hvdtrain.lightning needs Lightning: {error}. Run: pip install lightning") from error

from hvdtrain.lightning import host
from hvdtrain.lightning.fabric_strategy import HorovodFabricStrategy
from hvdtrain.lightning.metrics import connect_metrics
from hvdtrain.lightning.trainer_strategy import HorovodStrategy

__all__ = ["HorovodFabricStrategy", "HorovodStrategy", "connect_metrics"]

host.check()

_DESCRIPTION = "Averages gradients over the ranks of hvdtrain's Horovod"
StrategyRegistry.register("horovod", HorovodStrategy, description=_DESCRIPTION, override=True)
STRATEGY_REGISTRY.register("horovod", HorovodFabricStrategy, description=_DESCRIPTION, override=True)
