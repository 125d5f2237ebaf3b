"""The gradient of one step, in flight on the torch backend while the next step computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hvdtrain.keras.backends.torch import is_own, start
from hvdtrain.keras.delayed.handle import Handle
from hvdtrain.keras.reduction import GradientReduction, identity


class InFlight(Handle):
    """See `hvdtrain.keras.delayed`."""

    @torch.no_grad()
    def swap(
        self, gradients: Sequence[Tensor], names: Sequence[str], variables: Sequence[Any], how: GradientReduction
    ) -> tuple[list[Tensor], bool]:
        """Keep the gradients; return the mean of those of the step before, and False if there are none."""
        found = self.mean()
        self.put(None)
        kept = [_take(g, v) for g, v in zip(gradients, variables, strict=True)]
        if how.active():
            self.keep(list(variables), partial(start, kept, names, variables, how, may_change=lambda *_: True))
        else:
            self.keep(list(variables), partial(_alone, kept, how.factor))
        if found is None:
            return kept, False
        means = {identity(v): mean if isinstance(mean, Tensor) else torch.from_numpy(mean) for v, mean in found}
        late = [means.get(identity(v)) for v in variables]
        return [torch.zeros_like(g) if m is None else m.to(g) for m, g in zip(late, kept, strict=True)], True


def _take(gradient: Tensor, variable: Any) -> Tensor:
    """Take a gradient from its variable, which gets another one in the next step; copy one of the caller's."""
    if not is_own(gradient, variable):
        return gradient.clone()
    getattr(variable, "value", variable).grad = None
    return gradient


def _alone(gradients: list[Tensor], factor: float) -> Callable[[], list[Tensor]]:
    """Return what `start` returns where there are no other ranks."""
    return lambda: gradients if factor == 1.0 else [g * factor for g in gradients]
