"""Sum bfloat16 over ranks with float32's accuracy and half its bytes.

Horovod 0.28.1 can move bfloat16, as float16's bits, but not add it up: each rank gets its shard from all (alltoall),
adds it up in float32, rounds once, and sends the result to all (allgather).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.torch import engine
from hvdtrain.torch.engine import Handle


class Exchange(Handle):
    """A handle on a reduction of floats on one device; `prescale` multiplies before rounding, `postscale` the sum."""

    def __init__(
        self, tensors: Sequence[Tensor], *, name: str, process_set: Any, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        self._like = [(t.shape, t.dtype) for t in tensors]
        self._name, self._process_set, self._postscale = name, process_set, postscale
        size = process_set.size()
        shard = -(-sum(t.numel() for t in tensors) // size)
        bits = torch.zeros(size * shard, dtype=torch.bfloat16, device=tensors[0].device)
        offset = 0
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)
            bits[offset : offset + flat.numel()] = flat * prescale if prescale != 1.0 else flat
            offset += flat.numel()
        sent = bits.view(torch.float16)
        scatter = engine.native().alltoall_async(sent, name=f"{name}.scatter", process_set=process_set)
        self.first_half = Handle([scatter], self._start_second_half)  # waiting for it starts the second
        super().__init__([self.first_half], self._split)

    def _start_second_half(self, scattered: tuple[Tensor, Tensor]) -> Any:
        # (size, shard): one row per rank, added up in rank order
        mine = scattered[0].view(torch.bfloat16).view(self._process_set.size(), -1).float().sum(0)
        if self._postscale != 1.0:
            mine *= self._postscale
        bits = mine.to(torch.bfloat16).view(torch.float16)
        return engine.native().allgather_async(bits, name=f"{self._name}.gather", process_set=self._process_set)

    def _split(self, gather: Any) -> list[Tensor]:
        bits = engine.native().synchronize(gather).view(torch.bfloat16)
        sizes = [shape.numel() for shape, _ in self._like]
        parts = bits[: sum(sizes)].split(sizes)
        return [part.view(shape).to(dtype) for part, (shape, dtype) in zip(parts, self._like, strict=True)]
