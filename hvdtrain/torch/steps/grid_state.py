"""The state of a model that a Grid divides, as that of the whole model: in checkpoints nothing tells of the Grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hvdtrain.adapter import HostArrays, State, host_arrays
from hvdtrain.checkpoint import Kind
from hvdtrain.errors import DesyncError
from hvdtrain.torch.ops import digests, divided, dtypes
from hvdtrain.torch.ops.names import parameters_of
from hvdtrain.torch.steps import grid_arrays, training_state
from hvdtrain.torch.steps.grid_arrays import Entry

_TOTALS = "sum.totals"


class GridState:
    """Turns the state of this rank's part into that of the whole model, and back.

    Args:
        grid: the Grid.
        model: this rank's part.
        optimizer: its optimizer, and the precision scaler.
    """

    def __init__(self, grid: Any, model: nn.Module, optimizer: Callable[[], tuple[Any, Any]]) -> None:
        self._grid, self._world, self.model, self.optimizer = grid, grid.world, model, optimizer
        self._loaded: State | None = None
        self._metas: list[dict[str, Any]] = []  # of the stages
        self._entries: dict[str, Entry] = {}
        self._trained = frozenset[str]()
        self._has_begun = False

    # The whole of it

    def capture(self, own: State) -> State:
        """Return the whole model's state from that of this rank's part; a collective."""
        arrays = host_arrays(own.arrays)
        self._learn(own)
        sharded = {name: grid_arrays.sharded(self._grid, e, arrays.tensor) for name, e in self._entries.items()}
        part = {name: divided.local(arrays.tensor(name)) for name in arrays}
        return State(
            HostArrays({}),
            self._meta(),
            per_rank=own.per_rank,
            trained=self._trained,
            sharded=sharded,
            part=HostArrays(part, dtypes.to_array, dtypes.kind_on_host, digests.of_tensor),
        )

    def _learn(self, own: State) -> None:
        """Learn the names and kinds of the arrays of all stages; a collective."""
        arrays, grid = host_arrays(own.arrays), self._grid
        mine = {
            "arrays": _described(arrays),
            "meta": own.meta,
            "trained": sorted(own.trained),
            "settings": training_state.settings(self.optimizer()[0].param_groups),
        }
        stages = grid_arrays.of_stages(grid, mine, name="grid.state")
        self._metas = [each["meta"] for _, each in stages]
        self._trained = frozenset(name for _, each in stages for name in each["trained"])
        self._check_alike()
        if not self._has_begun:  # later the root alone may have loaded settings
            self._check_settings([each["settings"] for _, each in stages])
        self._has_begun = True
        found: dict[str, dict[str, Entry]] = {"model": {}, "optimizer": {}}
        for stage, (rank, each) in enumerate(stages):
            for name, shape, dtype in each["arrays"]:
                entry = Entry(rank, stage, name, Kind(tuple(shape), np.dtype(dtype)))
                file, _, rest = name.partition(".")
                if file == "optimizer":
                    index, _, key = rest.partition(".")
                    name = f"optimizer.{self._number(stage, int(index))}.{key}"
                found[file][name] = entry
        self._entries = found["model"] | found["optimizer"]

    def _check_alike(self) -> None:
        """Raise DesyncError on every rank if the optimizers of stages are of other classes or groups."""
        for stage, meta in enumerate(self._metas):
            here, there = ([each["layout"][0], len(each["layout"][1])] for each in (self._metas[0], meta))
            if here != there:
                raise DesyncError(
                    "The optimizers of all stages must be of one class, with as many parameter groups; a group may be "
                    f"empty. Received: {here[0]} with {here[1]} groups on stage 0, and {there[0]} with {there[1]} on "
                    f"stage {stage}"
                )

    def _check_settings(self, settings: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Raise DesyncError on every rank if a group has other settings on another stage: all would get the root's."""
        for stage, groups in enumerate(settings):
            for index, (first, own) in enumerate(zip(settings[0], groups, strict=True)):
                for name in (name for name in {**first, **own} if first.get(name) != own.get(name)):
                    raise DesyncError(
                        "A parameter group must have the same settings on all stages: groups of the same number are "
                        "one group of the whole model. Give the optimizer of each stage all groups, in one order; a "
                        f"group may be empty. Received: {name}={first.get(name)} in group {index} of stage 0, and "
                        f"{name}={own.get(name)} in group {index} of stage {stage}"
                    )

    def _counts(self) -> list[list[int]]:
        """Return the parameters of each stage's optimizer, by group."""
        return [[len(group) for group in meta["layout"][1]] for meta in self._metas]

    def number(self, index: int) -> int:
        """Return the number that a parameter of this rank's optimizer has in the whole model's."""
        return self._number(self._grid.stage, index)

    def _number(self, stage: int, index: int) -> int:
        """Return the number that a parameter of a stage's optimizer has in the whole model's optimizer.

        There each group has the parameters of the first stage, then those of the next one.
        """
        counts = self._counts()
        before = 0
        for group, count in enumerate(counts[stage]):
            if index < count:
                return before + sum(each[group] for each in counts[:stage]) + index
            index -= count
            before += sum(each[group] for each in counts)
        raise IndexError(index)

    def _meta(self) -> dict[str, Any]:
        """Return the meta data of the whole model's optimizer."""
        first = self._metas[0]
        layouts = [meta["layout"][1] for meta in self._metas]
        shapes = [[shape for layout in layouts for shape in layout[group]] for group in range(len(layouts[0]))]
        meta = {**first, "optimizer": {}, "layout": [first["layout"][0], shapes]}
        types: dict[str, str] = {}
        for stage, each in enumerate(self._metas):
            for index, entries in each["optimizer"].items():
                meta["optimizer"][str(self._number(stage, int(index)))] = entries
            for key, dtype in each.get("types", {}).items():
                index, _, name = key.partition(".")
                types[f"{self._number(stage, int(index))}.{name}"] = dtype
        return meta | ({"types": types} if types else {})

    # And back

    def load(self, state: State) -> None:
        """Restore this rank's part of a state of the whole model; `start` gives the others what the root alone has.

        Raises:
            ValueError: names the first tensor that does not fit.
        """
        arrays = host_arrays(state.arrays)
        kinds = {name: arrays.kind(name) for name in arrays}
        known = {name: entry.kind.shape for name, entry in self._entries.items() if name.startswith("model.")}
        saved = {name: kind.shape for name, kind in kinds.items() if name.startswith("model.")}
        for name in [*known, *saved]:
            here, there = known.get(name, "missing"), saved.get(name, "missing")
            if here != there:
                raise ValueError(f"tensor {name[6:]} is {there} in the checkpoint and {here} in the model")
        if "layout" not in state.meta:
            raise ValueError("the checkpoint has several optimizers, and a Grid's model has one")
        here, there = self._meta()["layout"], state.meta["layout"]
        if here != there:
            raise ValueError(f"the optimizer is {there} in the checkpoint and {here} here")
        groups = self.optimizer()[0].param_groups
        for group, saved_group in zip(groups, state.meta["groups"], strict=True):
            group.update(training_state.as_before(group, saved_group))
        part = _Part(self, state.meta, keeps_optimizer=_keeps_optimizer(state))
        for name in arrays:
            if part.has(name):
                part.put(name, arrays.take(name))
        part.finish()
        self._loaded = None if state.everywhere else state

    def start(self, own: Callable[[], State]) -> None:
        """Give all ranks what the root has loaded, and its optimizer's settings; a collective.

        Args:
            own: returns the state of this rank's part.
        """
        self._learn(own())
        state, self._loaded = self._loaded, None
        loaded: list[Any] | None = None
        if self._world.is_root and state is not None:
            loaded = [_described(host_arrays(state.arrays)), {**state.meta, "groups": None}, _keeps_optimizer(state)]
        found = self._world.broadcast_object(loaded, name="grid.loaded")
        if found is not None:
            self._spread(state if self._world.is_root else None, *found)
        self._share_settings()

    def _spread(self, state: State | None, described: Sequence[Any], meta: dict[str, Any], keeps: bool) -> None:
        """Send the root's arrays one by one; each rank keeps its parts of them."""
        arrays = None if state is None else host_arrays(state.arrays)
        part = _Part(self, meta, keeps_optimizer=keeps)
        for name, shape, dtype in described:
            sent = np.zeros(shape, np.dtype(dtype)) if arrays is None else np.array(arrays[name], order="C")
            array = self._world.broadcast(sent, name="grid.spread")
            if part.has(name):
                part.put(name, array)
        part.finish()

    def _share_settings(self) -> None:
        """Give all ranks the settings of the root's parameter groups, such as a rate that it has loaded."""
        groups = self.optimizer()[0].param_groups
        saved = [{k: _plain(v) for k, v in group.items() if k not in ("params", "param_names")} for group in groups]
        for group, values in zip(groups, self._world.broadcast_object(saved, name="grid.settings"), strict=True):
            group.update(training_state.as_before(group, values))


class _Part:
    """Puts arrays of the whole model's state into this rank's part."""

    def __init__(self, state: GridState, meta: dict[str, Any], *, keeps_optimizer: bool) -> None:
        self._model, (self._optimizer, self._scaler) = training_state.tensors(state.model), state.optimizer()
        self._parameters = parameters_of(self._optimizer)
        self._meta, self._keeps = meta, keeps_optimizer
        # By the numbers in the whole model's optimizer.
        self._own = {state.number(index): index for index in range(len(self._parameters))}
        self._entries: dict[int, dict[str, Any]] = {
            self._own[int(index)]: dict(values)
            for index, values in meta["optimizer"].items()
            if int(index) in self._own
        }

    def has(self, name: str) -> bool:
        """Return whether an array is of this part."""
        file, _, key = name.partition(".")
        if file == "model":
            return key in self._model
        return file == "optimizer" and not self._keeps and int(key.partition(".")[0]) in self._own

    def put(self, name: str, array: NDArray[Any]) -> None:
        """Put a whole array; of a divided tensor this rank keeps its part."""
        file, _, key = name.partition(".")
        if file == "model" and divided.is_divided(tensor := self._model[key]):
            with torch.no_grad():
                tensor.copy_(divided.like(torch.from_numpy(array).to(tensor.dtype), tensor))
        elif file == "model":
            dtypes.copy_array(self._model[key], array)
        else:
            index, _, entry = key.partition(".")
            place = self._own[int(index)]
            value = _value(array, self._parameters[place], self._meta.get("types", {}).get(key))
            _put(self._entries[place], entry, value)

    def finish(self) -> None:
        """Give the optimizer the state that was put, unless it keeps its own."""
        if self._keeps:
            return
        training_state.load_entries(self._optimizer, self._entries)
        if self._meta["scaler"]:
            self._scaler.load_state_dict(self._meta["scaler"])


def _described(arrays: HostArrays) -> list[Any]:
    """Return name, shape and type of each array, as JSON."""
    kinds = {name: arrays.kind(name) for name in arrays}
    return [[name, [*kind.shape], kind.dtype.str] for name, kind in kinds.items()]


def _keeps_optimizer(state: State) -> bool:
    """Return whether a state has weights alone."""
    return any(name.startswith("optimizer.") for name in state.elsewhere)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _value(array: NDArray[Any], parameter: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """Return an entry of a parameter's state, divided as the parameter if it is of its shape."""
    value = torch.from_numpy(array)
    if dtype is not None:
        value = value.to(getattr(torch, dtype))
    elif value.dim():
        value = value.to(parameter.dtype)
    if value.dim() and value.shape == parameter.shape:
        value = divided.like(value, parameter)
    return value


def _put(entries: dict[str, Any], name: str, value: torch.Tensor) -> None:
    owner, _, place = name.rpartition(".")
    if owner and isinstance(entries.get(owner), list):
        entries[owner][int(place)] = value
    else:
        entries[name] = value


def own_names(held: Mapping[str, NDArray[Any]], grid: Any) -> dict[str, NDArray[Any]]:
    """Return this rank's state under names that no other part has: ranks of other parts have other arrays."""
    prefix = _prefix(grid)
    return {name if name.startswith("random.") else f"{prefix}{name}": array for name, array in held.items()}


def from_own_names(held: Mapping[str, NDArray[Any]], grid: Any) -> dict[str, NDArray[Any]]:
    """Return what `own_names` was given, without what is of another Grid; ValueError if an epoch's metrics are.

    `grid` may be None.
    """
    prefix = "" if grid is None else _prefix(grid)
    random = {name: array for name, array in held.items() if name.startswith("random.")}
    others = {name: array for name, array in held.items() if name not in random}
    if grid is None:
        own = {name: array for name, array in others.items() if not name.startswith("grid.")}
    else:
        own = {name.removeprefix(prefix): each for name, each in others.items() if name.startswith(prefix)}
    if any(_TOTALS in name for name in others) and not any(name.startswith(_TOTALS) for name in own):
        raise ValueError(
            "The checkpoint was saved within an epoch, on another Grid, whose ranks have counted the epoch's metrics. "
            f"Received: {grid or 'no Grid'}. Resume with that Grid, or from a checkpoint of an epoch's end."
        )
    return random | own


def _prefix(grid: Any) -> str:
    return f"grid.{str(grid)[5:-1]}.{grid.stage}.{grid.shard}.{grid.tensor}."
