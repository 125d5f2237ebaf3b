"""Models that were made on the device "meta" on all ranks but the root: they get memory, and the root's values.

So one process of a host makes the values, and no other holds a copy of the model beside that on its device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.distributed import launch_environment
from hvdtrain.distributed.world import World
from hvdtrain.torch.ops import lazy, names
from hvdtrain.torch.ops.functions import broadcast_parameters
from hvdtrain.torch.steps import training_state


def place(model: nn.Module, optimizers: Iterable[Any], device: torch.device, world: World) -> torch.device:
    """Move a model and optimizers' state to their rank's device; see `training_state.place`, which it calls.

    Tensors on "meta" get memory there, and then all ranks have the root's values. A collective, but in an elastic job.
    Parameters stay the same objects, of which optimizers and tied modules hold references.

    Raises:
        ValueError: on every rank, if a tensor of the root has no values either; or the job is elastic.
    """
    fills = _are_empty(model, device, world)
    if fills:
        _take_memory(model, optimizers, device)
    inputs = training_state.place(model, device)
    for optimizer in optimizers:
        training_state.move_optimizer(optimizer)
    if fills:
        broadcast_parameters([*names.parameters(model), *names.buffers(model)], root_rank=0)
    return inputs


def _are_empty(model: nn.Module, device: torch.device, world: World) -> bool:
    """Return whether tensors of any rank have no values, and the root's have; a collective, but in an elastic job."""
    if device.type == "meta":  # of tests
        return False
    empty = next((name for name, each in lazy.tensors(model).items() if each.is_meta), None)
    if launch_environment.is_elastic():  # its new ranks make their model alone, and each needs values
        rank, everyones = world.rank, [empty]
    else:
        rank, everyones = 0, world.allgather_object(empty, name="meta device")
    lacking = everyones[0]
    if lacking is not None:
        raise ValueError(
            f'The model has no values. Received: {lacking} on the device "meta" on rank {rank}. Make it with values on '
            'rank 0, and in an elastic job on all ranks: with torch.device("cpu" if rank == 0 else "meta"): model = ...'
        )
    return any(each is not None for each in everyones)


def _take_memory(model: nn.Module, optimizers: Iterable[Any], device: torch.device) -> None:
    for _, parameter in names.parameters(model):
        if parameter.is_meta:
            new = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            new.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, new)
    made: dict[Tensor, Tensor] = {}  # a buffer that several modules hold stays one
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if buffer not in made:
                    made[buffer] = torch.empty_like(buffer, device=device)
                module._buffers[name] = made[buffer]
    for state in (state for optimizer in optimizers for state in optimizer.state.values()):
        for name, value in state.items():
            if isinstance(value, Tensor) and value.is_meta:
                state[name] = torch.empty_like(value, device=device)
