"""Parameters and buffers of torch's lazy modules, which have no shape before the first batch or a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hvdtrain.distributed import agreement, launch_environment
from hvdtrain.distributed.world import World
from hvdtrain.torch.ops import names


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name."""
    return {**dict(names.parameters(model)), **dict(names.buffers(model))}


def first(model: nn.Module) -> str | None:
    """Return the name of the first parameter or buffer without a shape; None if there is none."""
    return next((name for name, each in tensors(model).items() if is_lazy(each)), None)


def agree(model: nn.Module, world: World) -> None:
    """Raise unless all ranks have the same lazy modules; in an elastic job, if there are any."""
    if launch_environment.is_elastic():  # its new ranks make their model alone
        check(tensors(model).items(), what="An elastic job")
    else:
        lacking = {"a parameter without a shape": first(model)}
        agreement.require_equal(lacking, world=world, what="the model", advice="Call it on a batch on all ranks.")


def share_shapes(model: nn.Module, world: World) -> bool:
    """Give the tensors without a shape the root's, which may have loaded a checkpoint; return whether it has all."""
    here = tensors(model)
    shapes = {name: None if is_lazy(each) else tuple(each.shape) for name, each in here.items()}
    shapes = world.broadcast_object(shapes, name="lazy.shapes")
    materialize(here, {name: shape for name, shape in shapes.items() if shape is not None})
    return None not in shapes.values()


def check(named: Iterable[tuple[Any, Any]], *, what: str) -> None:
    """Raise ValueError if a tensor has no shape yet; names it."""
    name = next((name for name, each in named if is_lazy(each)), None)
    if name is not None:
        raise ValueError(
            f"{what} needs a model whose parameters have shapes. Received: {name} of a lazy module, which has none "
            "before its first batch. Call the model once on a batch before that: model(inputs)."
        )


def materialize(named: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Give the tensors without a shape those of a checkpoint or of another rank."""
    for name, tensor in named.items():
        if is_lazy(tensor) and name in shapes:
            tensor.materialize(shapes[name])
