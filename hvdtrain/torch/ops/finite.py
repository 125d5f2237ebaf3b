"""Find gradients that are not finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch

from hvdtrain.torch.ops.wire import as_real

_T = TypeVar("_T")


def all_finite(gradients: Sequence[torch.Tensor | None]) -> bool:
    """Return whether every element is finite; gradients that are None are left out."""
    dense = [as_real((g._values() if g.is_sparse else g).detach()) for g in gradients if g is not None]
    if not dense:
        return True
    if all(g.is_cuda and g.numel() for g in dense):  # one launch for many; on CPUs it takes ten times as long
        return bool(_stack(torch._foreach_norm(dense, float("inf"))).isfinite().all())
    # A sum costs a fiftieth of a test of each element, which follows where one is not finite: it may have overflowed.
    sums = _stack([g.sum(dtype=torch.float32) for g in dense])
    return bool(sums.isfinite().all()) or all(bool(g.isfinite().all()) for g in dense)


def _stack(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return them as one tensor; those of a spread model are on several devices."""
    return torch.stack([each.to(numbers[0].device) for each in numbers])


def first_non_finite(gradients: Iterable[tuple[_T, torch.Tensor | None]]) -> _T | None:
    """Return what stands beside the first gradient that is not finite, such as its parameter."""
    return next((beside for beside, gradient in gradients if not all_finite([gradient])), None)
