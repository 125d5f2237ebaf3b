"""The sharded step on the torch backend: parts are views of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch

from hvdtrain.distributed.recorder import recorder
from hvdtrain.errors import HvdTrainError
from hvdtrain.keras import basics
from hvdtrain.keras.shards import Shards
from hvdtrain.torch.reduction.division import flat
from hvdtrain.torch.reduction.publish import publish


def part(gradient: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return these numbers of a gradient, in one dimension."""
    return gradient.reshape(-1)[begin:end]


@torch.no_grad()
def step(
    shards: Shards,
    optimizer: Any,
    update: Callable[[list[Any], list[Any]], None],
    gradients: list[torch.Tensor],
    variables: list[Any],
) -> None:
    """Update this rank's parts of variables in place, and give all ranks all parts; see `hvdtrain.keras.shards`."""
    weights = [variable.value.detach() for variable in variables]
    bounds = [shards.bounds(weight.numel()) for weight in weights]
    parts = []
    for variable, weight, (begin, end) in zip(variables, weights, bounds, strict=True):
        if not weight.is_contiguous():
            raise HvdTrainError(
                "A weight whose state is sharded must be contiguous in memory. Received: "
                f"{variable.path} of shape {tuple(weight.shape)} with strides {weight.stride()} on rank "
                f"{basics.rank()}. Use weight.contiguous()."
            )
        # Keras takes a Parameter as it is.
        view = torch.nn.Parameter(flat(weight)[begin:end], requires_grad=False)
        parts.append(keras.Variable(view, trainable=False, autocast=False, name="part"))
        parts[-1]._hvd_whole = variable
    update(gradients, parts)
    ranks = shards.process_set or basics.process_sets().global_process_set
    with recorder.waiting():
        publish(weights, shards.division, ranks)
    torch.autograd.graph.increment_version(weights)
