"""Are the numbers still numbers? And if not: which, and what a step that is skipped must leave behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hvdtrain.torch.metrics import Totals


def all_finite(gradients: Sequence[torch.Tensor | None]) -> bool:
    """Return whether every element is; gradients that are None are left out.

    A sum over a tensor holds whatever in it is not finite, and costs a fiftieth of looking at each element. Where it
    overflowed without that, each element is looked at.
    """
    dense = [g._values() if g.is_sparse else g for g in gradients if g is not None]
    if not dense:
        return True
    if all(g.is_cuda and g.numel() for g in dense):  # one launch for many; on CPUs it takes ten times as long
        return bool(torch.stack(torch._foreach_norm([g.detach() for g in dense], float("inf"))).isfinite().all())
    sums = torch.stack([g.detach().sum(dtype=torch.float32) for g in dense])
    return bool(sums.isfinite().all()) or all(bool(g.isfinite().all()) for g in dense)


def first_non_finite(
    gradients: Iterable[tuple[torch.nn.Parameter, torch.Tensor | None]],
) -> torch.nn.Parameter | None:
    """Return the first parameter whose gradient is not finite."""
    return next((parameter for parameter, gradient in gradients if not all_finite([gradient])), None)


class Guard:
    """What a step changes before its gradient is known: running statistics, and what metrics have counted.

    Args:
        model: whose buffers.
        totals: of its metrics.
    """

    def __init__(self, model: torch.nn.Module, totals: Totals) -> None:
        self._buffers = list(model.buffers())
        self._before = [buffer.detach().clone() for buffer in self._buffers]
        self._totals = totals
        self._counted = totals.copy()

    @torch.no_grad()
    def remember(self) -> None:
        """Note how things are before the step."""
        for before, buffer in zip(self._before, self._buffers, strict=True):
            before.copy_(buffer)
        self._counted = self._totals.copy()

    @torch.no_grad()
    def go_back(self) -> None:
        """Make them so again."""
        for before, buffer in zip(self._before, self._buffers, strict=True):
            buffer.copy_(before)
        self._totals.go_back(self._counted)
