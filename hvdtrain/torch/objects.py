"""Send Python objects from one rank to the others."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from hvdtrain.torch import engine
from hvdtrain.torch.gather_ops import allgather_async, broadcast_async_


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: Any = None) -> Any:
    """Return the root's object on every rank.

    As Horovod's it pickles the object there and unpickles it here, which may run code: a rank's of this run, never a
    file's.

    Args:
        obj: the root's object; the other ranks' is ignored.
        root_rank: rank (among all, also with a process set) whose object it is.
        name: equal on all ranks; unnamed calls are matched by their order.
        process_set: the ranks that take part; None means all.
    """
    native = engine.native()
    process_set = engine.global_set(process_set)
    if process_set.size() == 1:
        return obj
    # Not named after the object's type, as in Horovod: the others need not know what the root sends.
    name = name or engine.auto_name("broadcast_object", process_set)
    is_root = native.rank() == root_rank
    data = _to_bytes(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([data.numel()])
    broadcast_async_(length, root_rank, f"{name}.length", process_set).wait()
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_async_(data, root_rank, f"{name}.bytes", process_set).wait()
    return obj if is_root else _from_bytes(data)


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """Return the objects of all ranks, in rank order; see `broadcast_object`."""
    process_set = engine.global_set(process_set)
    if process_set.size() == 1:
        return [obj]
    name = name or engine.auto_name("allgather_object", process_set)
    data = _to_bytes(obj)
    lengths = allgather_async(torch.tensor([data.numel()]), f"{name}.length", process_set)
    gathered = allgather_async(data, f"{name}.bytes", process_set)
    return [_from_bytes(part) for part in gathered.wait().split(lengths.wait().tolist())]


def _to_bytes(obj: Any) -> Tensor:
    # cloudpickle: what users send includes functions and classes of their script.
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())  # noqa: S301 - from a rank of this run
