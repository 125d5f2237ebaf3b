"""Add up or average gradients or weights over ranks in few operations, outside of backward."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hvdtrain.torch.ops import pack
from hvdtrain.torch.ops.compression import Compression, FP16Compressor
from hvdtrain.torch.ops.engine import Handle
from hvdtrain.torch.ops.reduce_ops import BF16Exchange, Reduction, submit
from hvdtrain.torch.reduction.reduction_unit import drain


class GradientExchange:
    """The operations in flight that reduce gradients.

    All ranks give gradients of the same shapes and types, in the same order. They may be overwritten.

    Args:
        name: of the operations; no others of this name may be in flight.
        compression: "none", "fp16" or "bf16".
    """

    def __init__(self, gradients: Sequence[Tensor], how: Reduction, *, name: str, compression: str) -> None:
        self._parts = [_Part([gradients[i] for i in members], members) for members in _groups(gradients, compression)]
        for index, part in enumerate(self._parts):
            part.start(how, f"{name}.{index}", compression)

    def wait(self) -> list[Tensor]:
        """Return the reduced gradients, in the order given."""
        results: dict[int, Tensor] = {}
        for part in self._parts:
            results |= part.wait()
        return [results[index] for index in range(len(results))]

    def drain(self) -> None:
        """Wait without a result."""
        for part in self._parts:
            part.drain()


class _Part:
    """Gradients that are reduced in one operation."""

    def __init__(self, gradients: list[Tensor], members: list[int]) -> None:
        self._gradients, self._members = gradients, members
        self._handle: Any = None
        self._thread: _SecondHalf | None = None

    def start(self, how: Reduction, name: str, compression: str) -> None:
        """Send them."""
        if compression == "bf16":
            self._handle = BF16Exchange(self._gradients, how, name)
            self._thread = _SecondHalf(self._handle.first_half)
            self._thread.start()
            return
        flat = self._gradients[0] if len(self._gradients) == 1 else pack.flat(self._gradients)
        sent, _ = (FP16Compressor if compression == "fp16" else Compression.none).compress(flat)
        self._handle = submit([sent], how, name, in_place=True, counted=False)

    def wait(self) -> dict[int, Tensor]:
        """Return the results by the gradients' numbers."""
        if self._thread is not None:
            self._thread.finish()
        results = self._handle.wait()
        if self._thread is None and len(self._gradients) > 1:
            results = pack.parts(results[0], [each.shape for each in self._gradients])
        reduced = [result.to(each.dtype) for result, each in zip(results, self._gradients, strict=True)]
        return dict(zip(self._members, reduced, strict=True))

    def drain(self) -> None:
        """Wait without a result."""
        if self._thread is not None:
            self._thread.join()
        drain(self._handle)


class _SecondHalf(threading.Thread):
    """Starts the second half of a bf16 exchange when the first one is done, on every rank, while steps compute.

    If the step started it, the second half would run after the computation. And rank 0, which waits alone before it
    writes a checkpoint, would wait for halves that other ranks have not started.
    """

    def __init__(self, first_half: Handle) -> None:
        super().__init__(name="hvdtrain-bf16", daemon=True)
        self._first_half = first_half
        self._error: BaseException | None = None

    def run(self) -> None:
        """Wait for the first half, which starts the second; Horovod waits without Python's lock."""
        try:
            self._first_half.wait()
        except Exception as error:  # noqa: BLE001 - raised where the step waits
            self._error = error

    def finish(self) -> None:
        """Wait until the second half is in flight; raise what went wrong."""
        self.join()
        if self._error is not None:
            raise self._error


def _groups(gradients: Sequence[Tensor], compression: str) -> list[list[int]]:
    """Return numbers of gradients that travel in one operation: small ones together, with bf16 all of a device."""
    if compression == "bf16":
        return pack.alike(range(len(gradients)), lambda index: gradients[index].device)
    return pack.small_together(gradients)
