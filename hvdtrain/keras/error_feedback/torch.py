"""Compression with error feedback on the torch backend: by the compressors of `hvdtrain.torch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.distributed.compression import Scheme
from hvdtrain.keras.reduction import GradientReduction
from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.compression import resolve
from hvdtrain.torch.ops.submit import Reduction
from hvdtrain.torch.reduction.gradient_exchange import GradientExchange


def compressor_of(scheme: Scheme) -> Any:
    """Return a compressor with a memory of its own."""
    return resolve(scheme).bind(())


@torch.no_grad()
def start(
    compressor: Any, gradients: Sequence[Tensor], names: Sequence[str], name: str, how: GradientReduction
) -> Callable[[], list[Tensor]]:
    """Start to average gradients over ranks; return a function that waits for the means."""
    reduction = Reduction(how.op, process_set=engine.global_set(how.process_set), **how.scales)
    return GradientExchange(gradients, reduction, name=name, compressor=compressor, names=names).wait
