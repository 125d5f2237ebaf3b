"""A moving average of a model's trained weights, beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from hvdtrain.adapter import host_arrays
from hvdtrain.torch.ops import lazy, names
from hvdtrain.torch.steps.training_state import to_host

# These have too few digits for the small change of an average, which is held in the wider type.
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


class AveragedWeights:
    """Averages of the parameters that are trained when it is made; it begins with their current values."""

    def __init__(self, model: torch.nn.Module | dict[str, torch.nn.Module]) -> None:
        model = torch.nn.ModuleDict(model) if isinstance(model, dict) else model
        lazy.check(names.parameters(model), what="EMA")
        self._weights = {name: p.detach() for name, p in names.parameters(model) if p.requires_grad}
        self._averages = {
            name: weight.to(_WIDER.get(weight.dtype, weight.dtype), copy=True) for name, weight in self._weights.items()
        }
        self._trained: list[torch.Tensor] | None = None  # the weights themselves, while the model holds the averages

    def update(self, share: float) -> None:
        """Move the averages towards the weights by this share of the difference."""
        averages = list(self._averages.values())
        weights = [w.to(a.dtype) for w, a in zip(self._weights.values(), averages, strict=True)]
        torch._foreach_lerp_(averages, weights, share)

    def show(self) -> None:
        """Put the averages into the model, until `hide`; copied, so that parameters stay where they are in memory."""
        if self._trained is None:
            self._trained = [weight.clone() for weight in self._weights.values()]
            self._write(self._averages.values())

    def hide(self) -> None:
        """Put the weights back, if the model holds the averages."""
        if self._trained is not None:
            self._write(self._trained)
            self._trained = None

    def _write(self, values: Any) -> None:
        for weight, value in zip(self._weights.values(), values, strict=True):
            weight.copy_(value)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the averages by the names of their parameters, as copies on the host."""
        return {name: to_host(average) for name, average in self._averages.items()}

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore what `arrays` returned; a ValueError names the first parameter that does not fit."""
        arrays = host_arrays(arrays)
        saved = {name: arrays.kind(name).shape for name in arrays}
        here = {name: tuple(average.shape) for name, average in self._averages.items()}
        for name in [*here, *saved]:
            if saved.get(name) != here.get(name):
                found, wanted = saved.get(name, "missing"), here.get(name, "missing")
                raise ValueError(f"the average of {name} is {found} in the checkpoint and {wanted} in the model")
        for name, average in self._averages.items():
            average.copy_(torch.from_numpy(arrays[name]))
