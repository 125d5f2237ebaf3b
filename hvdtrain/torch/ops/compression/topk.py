"""Send the largest numbers of each gradient."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.distributed.compression import TopK
from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.compression.memory import ErrorFeedback

_SAMPLE, _MARGIN = 2**14, 8  # numbers of the sample, at least; and more of its largest than the share of `k`


class TopKCompressor(ErrorFeedback):
    """Each rank sends the largest `fraction` of each gradient, by magnitude, and all ranks average what they get.

    Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017. For a gradient of n numbers a rank
    sends k = ceil(fraction * n) numbers and their places: 8 * k bytes in float32, 12 * k in float64, by one allgather.
    Each rank then gets this from all others. In the same order on all ranks, the numbers are added up.
    """

    scheme: TopK

    def mean(
        self, tensors: list[Tensor], names: Sequence[str], scale: float, process_set: Any, name: str
    ) -> Generator[Any, Any, list[Tensor]]:
        """Yield the allgather; return means that are zero where no rank has sent a number."""
        counts = [self.scheme.count(tensor.numel(), each) for tensor, each in zip(tensors, names, strict=True)]
        flats = [tensor.view(-1) for tensor in tensors]
        places = [_largest(flat.abs(), k) for flat, k in zip(flats, counts, strict=True)]
        values = torch.cat([flat[place] for flat, place in zip(flats, places, strict=True)])
        sent = torch.cat([values.view(torch.int32), torch.cat(places).to(torch.int32)])
        gathered = yield engine.native().allgather_async(sent, name=f"{name}.topk", process_set=process_set)
        ranks = gathered.view(process_set.size(), len(sent))
        split = values.view(torch.int32).numel()
        # (size, numbers): of all tensors, one row per rank
        everyones = ranks[:, :split].contiguous().view(values.dtype).split(counts, dim=1)
        everyplaces = ranks[:, split:].long().split(counts, dim=1)
        means = []
        for each, tensor, place, numbers, where in zip(names, tensors, places, everyones, everyplaces, strict=True):
            mean = torch.zeros_like(tensor).view(-1)
            for row, at in zip(numbers, where, strict=True):
                mean.index_add_(0, at, row)  # no place twice: the sum does not depend on the device's order
            means.append(mean.div_(len(numbers)).view_as(tensor))
            tensor.view(-1)[place] = 0.0
            self.put_error(each, tensor, numbers.isfinite().all(), scale)
        return means


def _largest(sizes: Tensor, k: int) -> Tensor:
    """Return the places of the k largest numbers; NaN is larger than infinity, and both than numbers: they are sent.

    On CPUs most numbers are left out first by a bound, which a sample gives: a third of the time of `topk` over all.
    """
    every = len(sizes) // _SAMPLE
    if sizes.is_cpu and every > 1:
        sample = sizes[::every]
        # Twice as many as are wanted, so that the bound is nearly never too high.
        bound = sample.topk(min(len(sample), 2 * k * len(sample) // len(sizes) + _MARGIN)).values[-1]
        candidates = (~(sizes < bound)).nonzero().view(-1)
        if k <= len(candidates) < len(sizes):
            return candidates[sizes[candidates].topk(k, sorted=False).indices]
    return sizes.topk(k, sorted=False).indices
