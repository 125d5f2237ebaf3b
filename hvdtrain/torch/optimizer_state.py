"""Give every rank the root's optimizer state, and change nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdtrain.torch import engine
from hvdtrain.torch.gather_ops import broadcast_async_
from hvdtrain.torch.objects import allgather_object, broadcast_object


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor in the root's state."""

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


@dataclass(frozen=True)
class _Param:
    """The place of a parameter among all parameters of the optimizer, where it is a key or a value of the state."""

    index: int


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None) -> None:
    """Overwrite `optimizer`'s state and options (learning rates and so on) with the root's.

    No step is taken and no gradient is touched. Works whether the root or the others have no state yet, for nested
    state and for LBFGS. Tensors keep their memory where the root's have the same type and shape.

    Args:
        optimizer: a plain or a distributed optimizer; parameter groups of equal lengths on all ranks.
        root_rank: rank whose state everybody gets.
        model: not needed; taken since Horovod's has it.

    Raises:
        ValueError: on every rank, if one has other parameter groups than the root.
    """
    if engine.native().size() == 1:
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    is_root = engine.native().rank() == root_rank
    tensors: list[Tensor] = []
    layout = _describe(optimizer, params, tensors) if is_root else None
    groups, state = broadcast_object(layout, root_rank)
    ours = [len(group["params"]) for group in optimizer.param_groups]
    for rank, lengths in enumerate(allgather_object(ours)):
        if lengths != groups["lengths"]:
            raise ValueError(
                f"Optimizers differ: rank {rank} has parameter groups of {lengths} parameters, rank {root_rank} of "
                f"{groups['lengths']}. Build the same optimizer on every rank before broadcast_optimizer_state."
            )
    if is_root:
        handles = [broadcast_async_(t, root_rank, f"optimizer_state.{i}") for i, t in enumerate(tensors)]
        for handle in handles:
            handle.wait()
        return
    _assign(optimizer, params, groups["options"], state, root_rank)


def _describe(optimizer: torch.optim.Optimizer, params: list[Tensor], tensors: list[Tensor]) -> Any:
    """Return the state's structure, with each tensor replaced by its place in `tensors`."""
    place = {id(p): i for i, p in enumerate(params)}

    def replace(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) in place:
                return _Param(place[id(value)])
            tensors.append(value)
            on_cpu = value.device.type == "cpu"
            # empty_like keeps dense layouts such as channels_last, and makes a dense one of all others.
            stride = torch.empty_like(value, device="meta").stride()
            return _Slot(len(tensors) - 1, tuple(value.shape), stride, value.dtype, on_cpu)
        return value

    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    lengths = [len(group["params"]) for group in optimizer.param_groups]
    # Pairs, not a dict: parameters are keys of the state.
    state = [(replace(key), _map(value, replace)) for key, value in optimizer.state.items()]
    return {"options": _map(options, replace), "lengths": lengths}, state


def _assign(
    optimizer: torch.optim.Optimizer, params: list[Tensor], options: list[Any], state: list[Any], root_rank: int
) -> None:
    """Receive the root's tensors, and put all values where they belong."""
    handles = []

    def receive(value: Any, old: Any, device: torch.device) -> Any:
        if isinstance(value, _Param):
            return params[value.index]
        if not isinstance(value, _Slot):
            return value
        device = torch.device("cpu") if value.on_cpu else device
        fits = isinstance(old, Tensor) and (tuple(old.shape), old.dtype, old.device) == (
            value.shape, value.dtype, device,
        )  # fmt: skip
        tensor = old if fits else torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
        handles.append(broadcast_async_(tensor, root_rank, f"optimizer_state.{value.index}"))
        return tensor

    for group, values in zip(optimizer.param_groups, options, strict=True):
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        for key in [k for k in group if k != "params" and k not in values]:
            del group[key]
        for key, value in values.items():
            group[key] = _map(value, lambda v, old, d=device: receive(v, old, d), group.get(key))
    new_state = []
    for key, value in state:
        owner = params[key.index] if isinstance(key, _Param) else key
        device = owner.device if isinstance(owner, Tensor) else params[0].device
        old = optimizer.state.get(owner)
        new_state.append((owner, _map(value, lambda v, old, d=device: receive(v, old, d), old)))
    optimizer.state.clear()
    optimizer.state.update(new_state)
    for handle in handles:
        handle.wait()


def _map(value: Any, leaf: Callable[..., Any], *old: Any) -> Any:
    """Apply `leaf` to all that is not a dict, list or tuple, in order, beside what is at the same place in `old`."""
    if isinstance(value, dict):
        return {k: _map(v, leaf, *(o.get(k) if isinstance(o, dict) else None for o in old)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [
            _map(v, leaf, *(o[i] if isinstance(o, (list, tuple)) and i < len(o) else None for o in old))
            for i, v in enumerate(value)
        ]
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*items)
        return type(value)(items)
    return leaf(value, *old)
