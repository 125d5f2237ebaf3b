"""Sum bfloat16 over ranks with float32's accuracy and half its bytes.

Horovod 0.28.1 cannot add bfloat16 up, but it can move it: every rank sends each other rank that one's shard
(alltoall), adds up its own shard in float32, rounds once, and sends the result to all (allgather). The bits travel as
float16, on which nothing is ever computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.torch import engine


class Exchange:
    """One reduction in flight, of several tensors.

    Args:
        tensors: floating point, on one device; shapes equal on all ranks.
        name: equal on all ranks.
        process_set: the ranks that take part.
        prescale: multiplies each rank's tensors before they are rounded.
        postscale: multiplies the sum before it is rounded.
    """

    def __init__(
        self, tensors: Sequence[Tensor], *, name: str, process_set: Any, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        self._like = [(t.shape, t.dtype) for t in tensors]
        self._name, self._process_set, self._postscale = name, process_set, postscale
        self._size = process_set.size()
        total = sum(t.numel() for t in tensors)
        shard = -(-total // self._size)
        device = tensors[0].device
        bits = torch.zeros(self._size * shard, dtype=torch.bfloat16, device=device)
        offset = 0
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)
            bits[offset : offset + flat.numel()] = flat * prescale if prescale != 1.0 else flat
            offset += flat.numel()
        self._native = engine.native()
        self._generation = engine.generation()
        self._scatter: Any = self._native.alltoall_async(
            bits.view(torch.float16), name=f"{name}.scatter", process_set=process_set
        )
        self._gather: Any = None

    @property
    def is_stale(self) -> bool:
        """True if Horovod was shut down since."""
        return self._generation != engine.generation()

    def poll(self) -> bool:
        """True when `wait` will not block; may start the second half."""
        if self._gather is None:
            if not self._native.poll(self._scatter):
                return False
            self.add_up()
        return bool(self._native.poll(self._gather))

    def add_up(self) -> None:
        """Wait for the first half, add this rank's shard up, and start the second half."""
        if self._gather is not None:
            return
        received, _ = self._native.synchronize(self._scatter)
        # (size, shard): one row a rank, added up in rank order
        mine = received.view(torch.bfloat16).view(self._size, -1).float().sum(0)
        if self._postscale != 1.0:
            mine *= self._postscale
        self._gather = self._native.allgather_async(
            mine.to(torch.bfloat16).view(torch.float16), name=f"{self._name}.gather", process_set=self._process_set
        )

    def wait(self) -> list[Tensor]:
        """Return the reduced tensors, in the types and shapes of those given."""
        self.add_up()
        bits = self._native.synchronize(self._gather).view(torch.bfloat16)
        results, offset = [], 0
        for shape, dtype in self._like:
            results.append(bits[offset : offset + shape.numel()].view(shape).to(dtype))
            offset += shape.numel()
        return results
