"""Find gradients that are not finite, and undo the step that made them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn import Parameter

from hvdtrain.torch.metrics import Totals


def all_finite(gradients: Sequence[torch.Tensor | None]) -> bool:
    """Return whether every element is finite; gradients that are None are left out.

    A sum over a tensor is not finite if an element is not, and costs a fiftieth of a test of each element. Since a sum
    can overflow too, each element is tested after a sum that is not finite.
    """
    dense = [g._values() if g.is_sparse else g for g in gradients if g is not None]
    if not dense:
        return True
    if all(g.is_cuda and g.numel() for g in dense):  # one launch for many; on CPUs it takes ten times as long
        return bool(torch.stack(torch._foreach_norm([g.detach() for g in dense], float("inf"))).isfinite().all())
    sums = torch.stack([g.detach().sum(dtype=torch.float32) for g in dense])
    return bool(sums.isfinite().all()) or all(bool(g.isfinite().all()) for g in dense)


def first_non_finite(gradients: Iterable[tuple[Parameter, torch.Tensor | None]]) -> Parameter | None:
    """Return the first parameter whose gradient is not finite."""
    return next((parameter for parameter, gradient in gradients if not all_finite([gradient])), None)


class BufferSnapshot:
    """What a step changes before its gradient is known: the model's buffers, and what metrics have counted."""

    def __init__(self, model: torch.nn.Module, totals: Totals) -> None:
        self._buffers = list(model.buffers())
        self._saved = [buffer.detach().clone() for buffer in self._buffers]
        self._totals = totals
        self._counted = totals.copy()

    @torch.no_grad()
    def take(self) -> None:
        """Save the state before a step."""
        for saved, buffer in zip(self._saved, self._buffers, strict=True):
            saved.copy_(buffer)
        self._counted = self._totals.copy()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore that state."""
        for saved, buffer in zip(self._saved, self._buffers, strict=True):
            buffer.copy_(saved)
        self._totals.restore(self._counted)
