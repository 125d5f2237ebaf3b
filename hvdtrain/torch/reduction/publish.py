"""Give all ranks the parts of the weights that each rank has updated."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.torch.ops import pack
from hvdtrain.torch.ops.engine import Handle
from hvdtrain.torch.ops.gather_ops import allgather_async, broadcast_async_
from hvdtrain.torch.reduction.division import Division, flat

_BUCKET_BYTES = 2**23  # of weights that are gathered together


def publish(weights: Sequence[Tensor], division: Division, process_set: Any) -> None:
    """Replace each rank's part of the weights by that of the rank that has updated it; a collective."""
    large = [p for p in weights if division.is_broadcast(p.numel(), p.element_size())]
    in_place = [
        handle for index, p in enumerate(large) for handle in _broadcast(p, f"shards.{index}", division, process_set)
    ]
    _gather([p for p in weights if not division.is_broadcast(p.numel(), p.element_size())], division, process_set)
    for handle in in_place:
        handle.wait()


def _broadcast(parameter: Tensor, name: str, division: Division, process_set: Any) -> list[Handle]:
    """Start to send each part of a weight from its rank, in place."""
    whole, ranks = flat(parameter.detach()), process_set.ranks or range(division.size)
    bounds = [(root, *division.bounds(len(whole), index)) for index, root in enumerate(ranks)]
    return [
        broadcast_async_(whole[begin:end], root, f"{name}.{root}", process_set)
        for root, begin, end in bounds
        if begin < end
    ]


def _gather(weights: Sequence[Tensor], division: Division, process_set: Any) -> None:
    """Gather weights in buckets, of which two are in flight."""
    kinds, rank = pack.alike(weights, pack.kind), process_set.rank()
    in_flight: deque[tuple[list[Tensor], Handle]] = deque()
    for index, bucket in enumerate(each for alike in kinds for each in pack.filled(alike, _BUCKET_BYTES)):
        if len(in_flight) == 2:
            _put(*in_flight.popleft(), division, rank)
        sent = torch.cat([_padded(flat(p.detach()), division, rank) for p in bucket])
        in_flight.append((bucket, allgather_async(sent, f"shards.bucket.{index}", process_set)))
    for each in in_flight:
        _put(*each, division, rank)


def _put(bucket: list[Tensor], handle: Handle, division: Division, own: int) -> None:
    """Put the other ranks' parts into weights; received is a row for each rank, with its part of each weight."""
    received = handle.wait().view(division.size, -1)
    columns = received.split([division.length(p.numel()) for p in bucket], dim=1)
    for parameter, parts in zip(bucket, columns, strict=True):
        weight = flat(parameter.detach())
        for rank, part in enumerate(parts):
            begin, end = division.bounds(weight.numel(), rank)
            if rank != own and begin < end:
                weight[begin:end] = part[: end - begin]


def _padded(whole: Tensor, division: Division, rank: int) -> Tensor:
    begin, end = division.bounds(len(whole), rank)
    part = whole[begin:end]
    missing = division.length(len(whole)) - len(part)
    return torch.cat([part, part.new_zeros(missing)]) if missing else part
