"""Say what to do where torch cannot compute or update with weights that it has divided over ranks (DTensor)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hvdtrain.distributed.world import World
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.ops import divided, names

_OF_DIVIDED = ("DTensor", "sharding strategy", "Sharding propagation")  # in what torch says


@contextmanager
def computing(model: nn.Module, world: World) -> Iterator[None]:
    """Within it, a forward pass that torch refuses because of how layers are divided raises HvdTrainError."""
    try:
        yield
    except RuntimeError as error:
        if world.grid is None or not _is_of_divided(error):
            raise
        uneven = [each for each in names.parameters(model) if divided.is_uneven_along(each[1], "tensor")]
        advice = (
            "Divide all weights that a layer uses, and convert or replace layers before fully_shard or "
            "parallelize_module"
        )
        received = str(world.grid)
        if uneven:
            name, each = uneven[0]
            advice = "Give divided layers widths that are multiples of the ranks that divide them"
            received = f"{name} of shape {tuple(each.shape)} with {world.grid}"
        raise HvdTrainError(
            f"torch cannot compute the layers as they are divided. {advice}. Received: {received} on rank "
            f"{world.rank}. torch says: {error}"
        ) from error


@contextmanager
def stepping(optimizer: Any, world: World) -> Iterator[None]:
    """Within it, a step that torch's optimizer cannot take with divided weights raises HvdTrainError."""
    try:
        yield
    except RuntimeError as error:
        if not _is_of_divided(error):
            raise
        chosen = sorted({name for group in optimizer.param_groups for name in ("foreach", "fused") if group.get(name)})
        advice = f"Leave out {chosen[0]}=" if chosen else "Use another optimizer, such as AdamW"
        received = f"{type(optimizer).__name__}({', '.join(f'{name}=True' for name in chosen)})"
        raise HvdTrainError(
            f"This optimizer cannot update weights that torch has divided over ranks. {advice}. Received: "
            f"{received} on rank {world.rank}. torch says: {error}"
        ) from error


def _is_of_divided(error: RuntimeError) -> bool:  # NotImplementedError is one
    return any(words in str(error) for words in _OF_DIVIDED)
