"""How gradients are to be reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.torch.compression import Compression
from hvdtrain.torch.reduce_kinds import Average


@dataclass(frozen=True)
class ReducerOptions:
    """What `DistributedOptimizer` was asked for; see there."""

    compression: Any = Compression.none
    op: int = Average
    gradient_predivide_factor: float = 1.0
    groups: Any = None
    sparse_as_dense: bool = False
    process_set: Any = None
    average_aggregated_gradients: bool = False
