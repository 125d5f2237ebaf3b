"""Several tensors in one: which tensors travel together, and the views of each in a flat one.

All ranks pack alike. On three ranks or more, the groups decide the last bits of sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from hvdtrain.distributed.buckets import ON_GPU, ON_HOST, Limits, fill_in_order
from hvdtrain.torch.ops.wire import REDUCED, from_order, in_order, memory_order, reduced_as

_T = TypeVar("_T")
_Tensor = TypeVar("_Tensor", bound=Tensor)


def limits(device: torch.device) -> Limits:
    """Return the limits of gradients on this device."""
    return ON_HOST if device.type == "cpu" else ON_GPU


def flat(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of tensors in one flat tensor, as `dtype` (None: their own)."""
    return torch.cat([(each if dtype is None else each.to(dtype)).reshape(-1) for each in tensors])


def parts(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return views of these shapes of the beginning of a flat tensor, one after the other."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]


def places(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a view of a flat tensor for each of `tensors`, one after the other, in the order that it has in memory.

    So a gradient in channels_last is copied as it lies: on a GPU with all others of the bucket, by one kernel.
    """
    orders = [memory_order(each) for each in tensors]
    pairs = list(zip(tensors, orders, strict=True))
    views = parts(flat, [each.shape if order is None else in_order(each, order).shape for each, order in pairs])
    return [view if order is None else from_order(view, order) for view, order in zip(views, orders, strict=True)]


def alike(items: Iterable[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """Return items in groups of equal keys, in the order of each group's first."""
    groups: dict[Hashable, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    """Return the type and device, which all tensors in one must have."""
    return tensor.dtype, tensor.device


def small_together(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return positions in groups: each large tensor alone, then small ones of one type and device together."""
    is_small = [tensor.nbytes < ON_HOST.alone for tensor in tensors]
    large = [[index] for index, small in enumerate(is_small) if not small]
    return [*large, *alike(itertools.compress(range(len(tensors)), is_small), lambda index: kind(tensors[index]))]


def partition(params: Sequence[_Tensor], groups: Any) -> list[list[_Tensor]]:
    """Return the parameters that are reduced in one operation, in the same order on all ranks.

    Args:
        params: those of an optimizer, in its order.
        groups: a number of groups, or lists of parameters; None or 0: each parameter alone.
    """
    if isinstance(groups, int) and groups > 0:
        quotient, rest = divmod(len(params), groups)
        starts = [i * quotient + min(i, rest) for i in range(groups + 1)]
        return [list(params[a:b]) for a, b in itertools.pairwise(starts) if a < b]
    if isinstance(groups, list):
        known = {id(p) for p in params}
        found = [[p for p in group if id(p) in known] for group in groups]
        grouped = {id(p) for group in found for p in group}
        return [group for group in found if group] + [[p] for p in params if id(p) not in grouped]
    return [[p] for p in params]


def filled(params: Sequence[_Tensor], most_bytes: int) -> list[list[_Tensor]]:
    """Return `params` in buckets of one device and at most so many bytes, in about the order of backward."""
    by_device = alike(reversed(params), lambda p: p.device)
    return [bucket for group in by_device for bucket in _filled(group, most_bytes)]


def buckets(params: Iterable[_Tensor]) -> list[list[_Tensor]]:
    """Return the small ones among `params` in buckets of one type and device, in about the order of backward."""
    native = [param for param in reversed(list(params)) if reduced_as(param.dtype) in REDUCED]
    size = sum(param.nbytes for param in native)
    is_tiny = all(size <= limits(param.device).tiny for param in native)
    small = [param for param in native if is_tiny or param.nbytes < limits(param.device).alone]
    filled = [bucket for group in alike(small, kind) for bucket in _filled(group, limits(group[0].device).bucket)]
    packed = [bucket for bucket in filled if len(bucket) > 1]
    return packed if is_tiny or not packed else packed[:-1] + _split_end(packed[-1])


def _filled(tensors: Sequence[_Tensor], most_bytes: int) -> list[list[_Tensor]]:
    """Return tensors, one after the other, in buckets of at most so many bytes; a larger one has its own."""
    return [[tensors[i] for i in bucket] for bucket in fill_in_order([tensor.nbytes for tensor in tensors], most_bytes)]


def _split_end(params: list[_Tensor]) -> list[list[_Tensor]]:
    """Split a bucket: the second part has backward's last gradients, if possible no more than `Limits.last`."""
    room, first = limits(params[0].device).last, len(params)
    while first > 0 and (room := room - params[first - 1].nbytes) >= 0:
        first -= 1
    first = min(first, len(params) - 1)
    return [params[:first], params[first:]] if first > 0 else [params]
