"""A moving average of a model's trained weights, beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.adapter import ShardedArray, host_arrays
from hvdtrain.checkpoint import Kind
from hvdtrain.torch.ops import divided, dtypes, lazy, names
from hvdtrain.torch.steps import grid_arrays
from hvdtrain.torch.steps.grid_arrays import Entry
from hvdtrain.torch.steps.training_state import to_host

# These have too few digits for the small change of an average, which is held in the wider type.
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


class AveragedWeights:
    """Averages of the parameters that are trained when it is made; it begins with their current values.

    Args:
        model: the model, or this rank's part of one that a Grid divides: then a rank averages its part, and the
            constructor and `load_parts` are collectives.
        grid: the Grid.
    """

    def __init__(self, model: torch.nn.Module | dict[str, torch.nn.Module], grid: Any = None) -> None:
        self._model = model = torch.nn.ModuleDict(model) if isinstance(model, dict) else model
        lazy.check(names.parameters(model), what="EMA")
        divided.reshard(model)
        self._weights = {name: p.detach() for name, p in names.parameters(model) if p.requires_grad}
        self._averages = {
            name: weight.to(_WIDER.get(weight.dtype, weight.dtype), copy=True) for name, weight in self._weights.items()
        }
        self._trained: list[torch.Tensor] | None = None  # the weights themselves, while the model holds the averages
        self._grid = grid
        self._entries: dict[str, Entry] = {}  # of all stages
        if grid is not None:
            mine = [[name, [*each.shape], dtypes.kind_on_host(each).dtype.str] for name, each in self._averages.items()]
            for stage, (rank, described) in enumerate(grid_arrays.of_stages(grid, mine, name="grid.averages")):
                for name, shape, dtype in described:
                    self._entries[name] = Entry(rank, stage, name, Kind(tuple(shape), np.dtype(dtype)))

    def update(self, share: float) -> None:
        """Move the averages towards the weights by this share of the difference."""
        if not self._averages:  # all of a part may be frozen, and torch takes no empty list
            return
        averages = [divided.local(each) for each in self._averages.values()]
        weights = [divided.local(w).to(a.dtype) for w, a in zip(self._weights.values(), averages, strict=True)]
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
        divided.reshard(self._model)  # else the next forward pass would compute with what it has gathered before
        for weight, value in zip(self._weights.values(), values, strict=True):
            divided.local(weight).copy_(divided.local(value))

    def arrays(self) -> dict[str, NDArray[Any] | ShardedArray]:
        """Return copies of the averages by the names of their parameters: on the host, or parts on their devices."""
        if self._grid is None:
            return {name: to_host(average) for name, average in self._averages.items()}
        copies = {name: average.clone() for name, average in self._averages.items()}
        return {name: grid_arrays.sharded(self._grid, e, copies.__getitem__) for name, e in self._entries.items()}

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore what `arrays` returned; a ValueError names the first parameter that does not fit."""
        arrays = host_arrays(arrays)
        here = {name: tuple(average.shape) for name, average in self._averages.items()}
        _check({name: arrays.kind(name).shape for name in arrays}, here)
        for name in arrays:
            self._put(name, arrays[name])

    def load_parts(self, arrays: Mapping[str, ShardedArray]) -> None:
        """Restore this rank's part of whole arrays, which come one after the other; see `load`. A collective."""
        here = {name: entry.kind.shape for name, entry in self._entries.items()}
        _check({name: each.kind.shape for name, each in arrays.items()}, here)
        for name, each in arrays.items():
            whole = each.gather(True)
            if name in self._averages and whole is not None:
                self._put(name, whole)

    def _put(self, name: str, array: NDArray[Any]) -> None:
        average = self._averages[name]
        divided.local(average).copy_(divided.local(divided.like(torch.from_numpy(array), average)))


def _check(saved: Mapping[str, tuple[int, ...]], here: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if the averages of a checkpoint are of other parameters."""
    for name in [*here, *saved]:
        if saved.get(name) != here.get(name):
            found, wanted = saved.get(name, "missing"), here.get(name, "missing")
            raise ValueError(f"the average of {name} is {found} in the checkpoint and {wanted} in the model")
