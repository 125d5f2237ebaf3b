"""Send parameters, optimizer state and Python objects from one rank to the others."""

from __future__ import annotations

import functools
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from hvdtrain.system import pickling
from hvdtrain.torch.ops import divided, engine, lazy
from hvdtrain.torch.ops.engine import Handle
from hvdtrain.torch.ops.gather_ops import allgather_async, broadcast_async_
from hvdtrain.torch.ops.names import parameters_of


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: Any = None) -> None:
    """Overwrite tensors with the root's, in place, and touch nothing else.

    Takes tensors of any type, layout and shape. Entries that are not tensors are left alone, with a warning.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, `model.parameters()`, or any dict or iterable of
            tensors or (name, tensor); else ValueError. Names and order must be equal on all ranks.
        root_rank: rank whose tensors all ranks get.
        process_set: the ranks, the root among them; None means all.
    """
    if isinstance(params, Mapping):
        items: list[tuple[Any, Any]] = sorted(params.items(), key=lambda item: str(item[0]))
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, Tensor)):
        items = [p if isinstance(p, tuple) and p[0] is not None else (i, p) for i, p in enumerate(params)]
        items = [(name, p[1] if isinstance(p, tuple) else p) for name, p in items]
    else:
        wanted = "a dict, or an iterable of tensors or of (name, tensor), such as model.state_dict()"
        raise ValueError(f"params must be {wanted}. Received: {type(params).__name__}")
    skipped = [str(name) for name, p in items if not isinstance(p, Tensor)]
    if skipped:
        words = "left these alone, since they are not tensors: {}. Send them with hvd.broadcast_object."
        warnings.warn(f"broadcast_parameters {words.format(', '.join(skipped))}", stacklevel=2)
    process_set = engine.global_set(process_set)
    if process_set.size() == 1:
        return
    lazy.check(items, what="broadcast_parameters")
    tensors = [(f"parameter.{name}", p) for name, p in items if isinstance(p, Tensor)]
    for handle in [broadcast_async_(p, root_rank, name, process_set) for name, p in tensors]:
        handle.wait()


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: Any = None) -> Any:
    """Return the root's object on every rank; the other ranks' is ignored.

    As in Horovod the root (a rank among all, also with a process set) pickles the object and the others unpickle it,
    which may run code: a rank's of this run, never a file's. See `allreduce` for `name` and `process_set`.
    """
    process_set = engine.global_set(process_set)
    if process_set.size() == 1:
        return obj
    # Not named after the object's type, as in Horovod: the others need not know what the root sends.
    name = name or engine.auto_name("broadcast_object", process_set)
    is_root = engine.native().rank() == root_rank
    data = _to_bytes(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = _length(data)
    broadcast_async_(length, root_rank, f"{name}.length", process_set).wait()
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    broadcast_async_(data, root_rank, f"{name}.bytes", process_set).wait()
    return obj if is_root else _from_bytes(data)


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """Return the objects of all ranks, in rank order; see `broadcast_object`."""
    process_set = engine.global_set(process_set)
    if process_set.size() == 1:
        return [obj]
    name = name or engine.auto_name("allgather_object", process_set)
    data = _to_bytes(obj)
    lengths = allgather_async(_length(data), f"{name}.length", process_set)
    gathered = allgather_async(data, f"{name}.bytes", process_set)
    return [_from_bytes(part) for part in gathered.wait().split(lengths.wait().tolist())]


def _to_bytes(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickling.dumps(obj)), dtype=torch.uint8)


def _length(data: Tensor) -> Tensor:
    return torch.tensor([data.numel()], dtype=torch.int64, device="cpu")


def _from_bytes(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())  # noqa: S301 - from a rank of this run


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor in the root's state."""

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool
    placements: Any = None  # how torch has divided the tensor, if it has: shape and stride are those of a part


@dataclass(frozen=True)
class _Param:
    index: int  # of a parameter among all of the optimizer's, where it is a key or a value of the state


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None, process_set: Any = None
) -> None:
    """Overwrite `optimizer`'s state and options (learning rates and so on) with the root's.

    No step is taken and no gradient is touched. The root or the others may have no state yet. Tensors keep their memory
    where the root's have the same type and shape.

    Args:
        optimizer: a plain or a distributed optimizer; parameter groups of equal lengths on all ranks.
        root_rank: rank whose state all ranks get.
        model: not needed; taken since Horovod's has it.
        process_set: the ranks, the root among them; None means all.

    Raises:
        ValueError: on every rank, if one has other parameter groups than the root; on a rank that has other parts of
            weights, which torch has divided, than another rank of the process set.
    """
    process_set = engine.global_set(process_set)
    if process_set.size() == 1:
        return
    shards = optimizer.__dict__.get("_hvd_shards")
    with nullcontext() if shards is None else shards.set_aside():  # a state of which each rank holds a part
        _broadcast(optimizer, root_rank, process_set)
    if shards is not None:
        shards.spread(root_rank)


def _broadcast(optimizer: torch.optim.Optimizer, root_rank: int, process_set: Any) -> None:
    params = parameters_of(optimizer)
    for each in filter(divided.is_divided, params):
        if others := divided.others_with_parts(each) & set(process_set.ranks):
            raise ValueError(
                "Other ranks hold other parts of the optimizer's state, because torch has divided the weights over "
                f"them. Received: ranks {sorted(others)} in the process set, on rank {engine.native().rank()}. Pass "
                "process_set=grid.process_set and root_rank=grid.part_root: its ranks hold the same part"
            )
    is_root = engine.native().rank() == root_rank
    tensors: list[Tensor] = []
    layout = _describe(optimizer, params, tensors) if is_root else None
    groups, state = broadcast_object(layout, root_rank, process_set=process_set)
    ours = [len(group["params"]) for group in optimizer.param_groups]
    for rank, lengths in enumerate(allgather_object(ours, process_set=process_set)):
        if lengths != groups["lengths"]:
            raise ValueError(
                f"Optimizers differ: rank {rank} has parameter groups of {lengths} parameters, rank {root_rank} of "
                f"{groups['lengths']}. Build the same optimizer on every rank before broadcast_optimizer_state."
            )
    if is_root:
        handles = [broadcast_async_(t, root_rank, f"optimizer_state.{i}", process_set) for i, t in enumerate(tensors)]
    else:
        send = functools.partial(broadcast_async_, root_rank=root_rank, process_set=process_set)
        handles = _assign(optimizer, params, groups["options"], state, send)
    for handle in handles:
        handle.wait()


def _describe(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], tensors: list[Tensor]) -> Any:
    """Return the state's structure, with each tensor replaced by its place in `tensors`."""
    place = {id(p): i for i, p in enumerate(params)}

    def replace(value: Any, _: Any = None) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in place:
            return _Param(place[id(value)])
        part = divided.local(value)
        tensors.append(part)
        # empty_like preserves dense layouts such as channels_last, and makes all others dense.
        stride = torch.empty_like(part, device="meta").stride()
        placements = getattr(value, "placements", None)
        return _Slot(len(tensors) - 1, tuple(part.shape), stride, part.dtype, part.device.type == "cpu", placements)

    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    lengths = [len(group["params"]) for group in optimizer.param_groups]
    # Pairs, not a dict: parameters are keys of the state.
    state = [(replace(key), _map(value, replace)) for key, value in optimizer.state.items()]
    return {"options": _map(options, replace), "lengths": lengths}, state


def _assign(
    optimizer: torch.optim.Optimizer,
    params: Sequence[Tensor],
    options: list[Any],
    state: list[Any],
    send: Callable[..., Handle],
) -> list[Handle]:
    """Put the root's values where they belong; return handles on the tensors among them."""
    handles = []

    def receive(value: Any, old: Any, device: torch.device, owner: Any = None) -> Any:
        if isinstance(value, _Param):
            return params[value.index]
        if not isinstance(value, _Slot):
            return value
        device = torch.device("cpu") if value.on_cpu else device
        wanted = (value.shape, value.dtype, device, value.placements)
        part = divided.local(old)
        fits = isinstance(old, Tensor) and (
            tuple(part.shape), part.dtype, part.device, getattr(old, "placements", None)
        ) == wanted  # fmt: skip
        if not fits:
            part = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
        handles.append(send(part, name=f"optimizer_state.{value.index}"))
        if fits or value.placements is None:
            return old if fits else part
        return divided.of_part(part, value.placements, owner)

    for group, values in zip(optimizer.param_groups, options, strict=True):
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        for key in [k for k in group if k != "params" and k not in values]:
            del group[key]
        for key, value in values.items():
            group[key] = _map(value, functools.partial(receive, device=device), group.get(key))
    new_state = []
    for key, value in state:
        owner = params[key.index] if isinstance(key, _Param) else key
        device = owner.device if isinstance(owner, Tensor) else params[0].device
        into = functools.partial(receive, device=device, owner=owner)
        new_state.append((owner, _map(value, into, optimizer.state.get(owner))))
    optimizer.state.clear()
    optimizer.state.update(new_state)
    return handles


def _map(value: Any, leaf: Callable[[Any, Any], Any], old: Any = None) -> Any:
    """Apply `leaf` to all that is not a dict, list or tuple, in order, beside what is at the same place in `old`."""
    if isinstance(value, dict):
        there: Any = old if isinstance(old, dict) else {}
        return {k: _map(v, leaf, there.get(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        there = old if isinstance(old, (list, tuple)) else ()
        items = list(map(_map, value, repeat(leaf), chain(there, repeat(None))))
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a named tuple, or not
    return leaf(value, old)
