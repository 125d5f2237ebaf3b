"""Add up or average gradients or weights over ranks in few operations, outside of backward."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hvdtrain.torch.ops import pack
from hvdtrain.torch.ops.compression import Compressor
from hvdtrain.torch.ops.engine import Staged
from hvdtrain.torch.ops.submit import Reduction
from hvdtrain.torch.reduction.reduction_unit import drain


class GradientExchange:
    """The operations in flight that reduce gradients.

    All ranks give gradients of the same shapes and types, in the same order. They may be overwritten.

    Args:
        name: of the operations; no others of this name may be in flight.
        names: of the parameters, to which the compressor is bound; none for weights.
    """

    def __init__(
        self,
        gradients: Sequence[Tensor],
        how: Reduction,
        *,
        name: str,
        compressor: Compressor,
        names: Sequence[str] = (),
    ) -> None:
        if compressor.is_cast:
            groups = pack.small_together(gradients)
        elif compressor.bucket_bytes:
            groups = pack.alike(range(len(gradients)), lambda index: gradients[index].device)
        else:
            groups = [[index] for index in range(len(gradients))]
        self._parts: list[_Part] = []
        for number, members in enumerate(groups):
            of_part = [names[index] for index in members] if names else ()
            given = [gradients[index] for index in members]
            self._parts.append(_Part(given, members, compressor, how, f"{name}.{number}", of_part))

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
    """Gradients that are reduced in one operation; values that are only cast travel in one tensor."""

    def __init__(
        self,
        gradients: list[Tensor],
        members: list[int],
        compressor: Compressor,
        how: Reduction,
        name: str,
        names: Sequence[str],
    ) -> None:
        self._members = members
        self._shapes = [each.shape for each in gradients] if compressor.is_cast and len(gradients) > 1 else None
        sent = gradients if self._shapes is None else [pack.flat(gradients)]
        self._handle: Any = compressor.exchange(sent, how, name, names)
        self._thread = _Waiting(self._handle) if isinstance(self._handle, Staged) else None

    def wait(self) -> dict[int, Tensor]:
        """Return the results by the gradients' numbers."""
        if self._thread is not None:
            self._thread.finish()
        results = self._handle.wait()
        if self._shapes is not None:
            results = pack.parts(results[0], self._shapes)
        return dict(zip(self._members, results, strict=True))

    def drain(self) -> None:
        """Wait without a result."""
        if self._thread is not None:
            self._thread.join()
        drain(self._handle)


class _Waiting(threading.Thread):
    """Starts each next collective of an exchange when the one before is done, on every rank, while steps compute.

    If the step started them, the second one would run after the computation. And rank 0, which waits alone before it
    writes a checkpoint, would wait for collectives that other ranks have not started.
    """

    def __init__(self, handle: Staged) -> None:
        super().__init__(name="hvdtrain-stages", daemon=True)
        self._handle = handle
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Wait for all collectives; Horovod waits without Python's lock."""
        try:
            self._handle.wait()
        except Exception as error:  # noqa: BLE001 - raised where the step waits
            self._error = error

    def finish(self) -> None:
        """Wait until the last one is done; raise what went wrong."""
        self.join()
        if self._error is not None:
            raise self._error
