"""Weights, optimizer state and precision scaler as plain arrays and JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import is_lazy

from hvdtrain.adapter import HostArrays, ShardedArray, State, host_arrays
from hvdtrain.data.trees import tree_map
from hvdtrain.torch.ops import digests, dtypes, lazy, names
from hvdtrain.torch.ops.names import parameters_of
from hvdtrain.torch.reduction.sharded import Shards
from hvdtrain.torch.reduction.unread import Unread
from hvdtrain.torch.reduction.weight_access import Optimizers


def to_host(value: Any) -> NDArray[Any]:
    """Return a copy on the host; see `dtypes.to_array`."""
    return np.array(dtypes.to_array(value) if isinstance(value, torch.Tensor) else value)


def on_device(tree: Any, device: torch.device) -> Any:
    """Return `tree` with its tensors on `device`."""
    return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, tree)


def place(model: torch.nn.Module, device: torch.device) -> torch.device:
    """Move a model to its rank's device, and return where its inputs go.

    A model that is spread over several devices stays where it is; its inputs go to the device of its first parameter.
    """
    devices = dict.fromkeys(parameter.device for _, parameter in names.parameters(model))
    if len(devices) > 1:
        return next(iter(devices))
    model.to(device)
    return device


def move_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Move the state that an optimizer already has to where its parameters are; step counters stay put."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if name != "step" and isinstance(parameter, torch.Tensor):
                state[name] = on_device(value, parameter.device)


def capture(model: torch.nn.Module, optimizers: Optimizers) -> State:
    """Return all that training changes. Nothing is copied before it is read, and then only what is on a GPU.

    A collective if an optimizer's state is in shards.
    """
    lazy.check(tensors(model).items(), what="A checkpoint")
    found = {f"model.{name}": tensor for name, tensor in tensors(model).items()}
    metas: dict[str, dict[str, Any]] = {}
    sharded: dict[str, ShardedArray] = {}
    for name, (optimizer, scaler) in optimizers.items():
        own, metas[name] = _capture_optimizer(optimizer, scaler)
        shards: Shards | None = optimizer.__dict__.get("_hvd_shards")
        if shards is not None:
            whole = {key: tensor for key, tensor in own.items() if tensor.is_meta}
            sharded |= {f"{_prefix(name)}{key}": _sharded(shards, key, like) for key, like in whole.items()}
            own = {key: tensor for key, tensor in own.items() if key not in whole}
        found |= {f"{_prefix(name)}{key}": tensor for key, tensor in own.items()}
    arrays = HostArrays(found, dtypes.to_array, dtypes.kind_on_host, digests.of_tensor)
    shared = model.named_buffers(remove_duplicate=False)  # a layer that comes again has several names in a state_dict
    per_rank = frozenset(found.keys() & {f"model.{names.plain(name)}" for name, _ in shared})
    trained = frozenset(f"model.{name}" for name, each in names.parameters(model) if each.requires_grad)
    every = model.named_parameters(remove_duplicate=False)  # a tied weight has several names in a state_dict
    frozen = frozenset(f"model.{names.plain(name)}" for name, each in every if not each.requires_grad)
    meta = metas.get("", {"optimizers": metas})
    return State(arrays, meta, sharded=sharded, per_rank=per_rank, trained=trained, frozen=frozen)


def _sharded(shards: Shards, key: str, like: torch.Tensor) -> ShardedArray:
    index, name = key.split(".", 1)

    def gather(everywhere: bool) -> NDArray[Any] | None:
        whole = shards.whole(int(index), name, like.dtype, to=None if everywhere else 0)
        return None if whole is None else dtypes.to_array(whole)

    return ShardedArray(dtypes.kind_on_host(like), gather)


def _capture_optimizer(optimizer: Any, scaler: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return an optimizer's tensors, those of which ranks hold parts on the device "meta", and JSON values."""
    saved, parameters = _state_dict(optimizer), parameters_of(optimizer)
    if (shards := optimizer.__dict__.get("_hvd_shards")) is not None:
        saved["state"] = shards.describe()
    found: dict[str, torch.Tensor] = {}
    types: dict[str, str] = {}  # of what has another type than its parameter, in which torch would load it
    scalars: dict[str, dict[str, Any]] = {}
    for index, entries in saved["state"].items():
        scalars[str(index)] = {}
        for name, value in entries.items():
            # LBFGS has lists of tensors: one array each, and None in its place.
            parts = {f".{i}": each for i, each in enumerate(value)} if isinstance(value, list) else {"": value}
            tensors = {part: each for part, each in parts.items() if isinstance(each, torch.Tensor)}
            found |= {f"{index}.{name}{part}": each for part, each in tensors.items()}
            own = parameters[index].dtype
            named = {f"{index}.{name}{part}": str(each.dtype) for part, each in tensors.items() if each.dtype != own}
            types |= {} if name == "step" else {key: dtype.removeprefix("torch.") for key, dtype in named.items()}
            if isinstance(value, list):
                scalars[str(index)][name] = [None if part in tensors else each for part, each in parts.items()]
            elif not tensors:
                scalars[str(index)][name] = value
    groups = [
        {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
        for group in saved["param_groups"]
    ]
    meta = {"optimizer": scalars, "groups": groups, "scaler": scaler.state_dict(), "layout": _layout(optimizer)}
    return found, meta | ({"types": types} if types else {})


def _state_dict(optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's state_dict, without a state that is in shards."""
    sharded: Shards | None = optimizer.__dict__.get("_hvd_shards")
    with nullcontext() if sharded is None else sharded.set_aside():
        found: dict[str, Any] = optimizer.state_dict()
    return found


# Keys of a parameter group that are no settings of the user's: those of schedulers, and how a step is computed.
_NO_SETTINGS = frozenset({
    "params", "param_names", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "foreach",
    "fused", "capturable", "differentiable",
})  # fmt: skip


def settings(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings of parameter groups as JSON: numbers, and lists of them."""
    return [
        {
            name: plain
            for name, value in group.items()
            if name not in _NO_SETTINGS and (plain := _plain(value)) is not None
        }
        for group in groups
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, tuple | list):
        parts = [_plain(each) for each in value]
        return None if None in parts else parts
    return value if isinstance(value, bool | int | float | str) else None


def _prefix(name: str) -> str:
    return f"optimizer.{name}." if name else "optimizer."


def restore(state: State, model: torch.nn.Module, optimizers: Optimizers) -> None:
    """Restore what `capture` returned; a ValueError names the first tensor that does not fit, before any changes."""
    arrays = host_arrays(state.arrays)
    saved = arrays.renamed({names.plain(name[6:]): name for name in arrays if name.startswith("model.")})
    saved_shapes = {name: saved.kind(name).shape for name in saved}
    lazy.materialize(tensors(model), saved_shapes)
    current = tensors(model)
    lazy.check(current.items(), what="Loading a checkpoint")
    shapes = {name: tuple(each.shape) for name, each in current.items()}
    for name in [*current, *saved]:
        here, there = shapes.get(name, "missing"), saved_shapes.get(name, "missing")
        if here != there:
            raise ValueError(f"tensor {name} is {there} in the checkpoint and {here} in the model")
    for name, tensor in current.items():
        dtype = saved.kind(name).dtype
        if (dtype.kind == "c") != tensor.is_complex():
            raise ValueError(f"tensor {name} is {dtype} in the checkpoint and {tensor.dtype} in the model")
    metas = state.meta.get("optimizers", {"": state.meta})
    if sorted(metas) != sorted(optimizers):
        raise ValueError(f"the checkpoint has the optimizers {sorted(metas)}, and here are {sorted(optimizers)}")
    for name, (optimizer, _) in optimizers.items():
        before, layout = metas[name]["layout"], _layout(optimizer)
        if before[0] == layout[0] and len(before[1]) != len(layout[1]):
            raise ValueError(
                f"the optimizer{name and ' '}{name} has {len(before[1])} parameter groups in the checkpoint and "
                f"{len(layout[1])} here. Add the groups before fit, also those that a callback adds"
            )
        if before != layout:
            raise ValueError(f"the optimizer{name and ' '}{name} is {before} in the checkpoint and {layout} here")
    for name, tensor in current.items():
        dtypes.copy_array(tensor, saved[name])
    for name, (optimizer, scaler) in optimizers.items():
        prefix = _prefix(name)
        own = {key.removeprefix(prefix): key for key in arrays if key.startswith(prefix)}
        keeps = any(key.startswith(prefix) for key in state.elsewhere)
        _restore_optimizer(arrays.renamed(own), metas[name], optimizer, scaler, keeps_shards=keeps)


def _restore_optimizer(
    arrays: HostArrays, meta: dict[str, Any], optimizer: Any, scaler: Any, *, keeps_shards: bool
) -> None:
    entries: dict[int, dict[str, Any]] = {int(index): deepcopy(values) for index, values in meta["optimizer"].items()}
    sharded: Shards | None = optimizer.__dict__.get("_hvd_shards")
    parameters, types = parameters_of(optimizer), meta.get("types", {})
    for name in arrays:
        index, key = name.split(".", 1)
        if sharded is not None and key != "step":  # the root may have no room for a whole state
            entries[int(index)][key] = _unread(arrays, name, types.get(name), parameters[int(index)])
            continue
        value = torch.from_numpy(arrays.take(name))
        owner, _, place = key.rpartition(".")
        if owner:
            entries[int(index)][owner][int(place)] = value
        else:
            entries[int(index)][key] = value
    groups = [
        {**as_before(group, old), "params": group["params"]}
        for group, old in zip(_state_dict(optimizer)["param_groups"], meta["groups"], strict=True)
    ]
    if sharded is not None:
        with sharded.set_aside() if keeps_shards else nullcontext():
            optimizer.load_state_dict({"state": {}, "param_groups": groups})
        if not keeps_shards:
            sharded.load(entries)
        types = {}
    else:
        optimizer.load_state_dict({"state": entries, "param_groups": groups})
    for name, dtype in types.items():
        index, key = name.split(".", 1)
        owner, _, place = key.rpartition(".")
        parameter = parameters[int(index)]
        state = optimizer.state[parameter]
        value = torch.from_numpy(arrays.take(name)).to(parameter.device, getattr(torch, dtype))
        if owner:
            state[owner][int(place)] = value
        else:
            state[key] = value
    if meta["scaler"]:  # empty where the checkpoint's run had none
        scaler.load_state_dict(meta["scaler"])


def load_entries(optimizer: Any, state: dict[int, dict[str, Any]]) -> None:
    """Replace the state of an optimizer's parameters, by their number, and leave its groups as they are."""
    groups, parameters = _state_dict(optimizer)["param_groups"], parameters_of(optimizer)
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for index, entries in state.items():  # of which torch has given some the parameter's type
        loaded = optimizer.state[parameters[index]]
        for name, value in entries.items():
            if isinstance(value, torch.Tensor) and name != "step" and loaded[name].dtype != value.dtype:
                loaded[name] = value.to(parameters[index].device)


def _unread(arrays: HostArrays, name: str, dtype: str | None, parameter: torch.Tensor) -> Unread | torch.Tensor:
    """Return an entry of a weight's state that is read when it is divided; read here, if it is one number."""
    kind = arrays.kind(name)
    of_type = parameter.dtype if dtype is None else getattr(torch, dtype)
    entry = Unread(kind.shape, of_type, lambda: torch.from_numpy(arrays.take(name)).to(of_type))
    return entry if kind.shape == tuple(parameter.shape) and parameter.numel() > 1 else entry.read()


def random_states() -> dict[str, NDArray[Any]]:
    """Return the random states that torch draws from, on the host and on this rank's GPU if it uses one."""
    held = {"random.torch": torch.get_rng_state().numpy()}
    if torch.cuda.is_initialized():
        held["random.cuda"] = torch.cuda.get_rng_state().numpy()
    return held


def set_random_states(held: dict[str, NDArray[Any]]) -> None:
    """Restore what `random_states` returned, as far as it is there."""
    if "random.torch" in held:
        torch.set_rng_state(torch.from_numpy(held["random.torch"].copy()))
    if "random.cuda" in held and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(torch.from_numpy(held["random.cuda"].copy()))


def reseed(seeds: Mapping[str, int]) -> None:
    """Seed those of torch's generators that are in `seeds`, by the names that `random_states` gives them."""
    if "random.torch" in seeds:
        torch.default_generator.manual_seed(seeds["random.torch"])
    if "random.cuda" in seeds:
        torch.cuda.manual_seed(seeds["random.cuda"])


def rank_state(model: torch.nn.Module) -> dict[str, NDArray[Any]]:
    """Return the random states, and the buffers, which are averaged over ranks when an epoch ends."""
    return random_states() | {name: to_host(buffer) for name, buffer in _buffers(model).items()}


def set_rank_state(held: dict[str, NDArray[Any]], model: torch.nn.Module) -> None:
    """Restore what `rank_state` returned, as far as it is there."""
    set_random_states(held)
    held = {names.plain(name): array for name, array in held.items()}  # older checkpoints have names of compiled models
    for name, buffer in _buffers(model).items():
        if name in held:
            dtypes.copy_array(buffer, held[name].copy())


def trained_flags(model: torch.nn.Module) -> NDArray[np.uint8]:
    """Return for each parameter whether it is trained."""
    return np.array([parameter.requires_grad for parameter in model.parameters()], np.uint8)


def set_trained_flags(flags: NDArray[np.uint8], model: torch.nn.Module) -> list[str]:
    """Restore what `trained_flags` returned; return the names of the parameters that were trained or frozen by it."""
    parameters = list(names.parameters(model))
    if len(flags) != len(parameters):  # of another model, with the same tensors
        return []
    pairs = zip(parameters, flags.astype(bool).tolist(), strict=True)
    changed = {name: parameter for (name, parameter), flag in pairs if parameter.requires_grad != flag}
    for parameter in changed.values():
        parameter.requires_grad_(not parameter.requires_grad)
    return list(changed)


def _buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's buffers under the names that `hvdtrain.distributed.rank_state` explains."""
    buffers = ((name, buffer) for name, buffer in names.buffers(model) if not is_lazy(buffer))
    return {f"{dtypes.rule(buffer)}.buffer.{name}": buffer for name, buffer in buffers}


def _layout(optimizer: Any) -> list[Any]:
    """Return the optimizer's class, and the shapes of its parameters group by group: what its state belongs to."""
    shapes = [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]
    return [type(optimizer).__name__, shapes]


def as_before(group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return a group's saved options in the types it has now: JSON knows neither tuples nor tensors."""

    def restored(value: Any, here: Any) -> Any:
        if isinstance(here, torch.Tensor):
            return torch.as_tensor(value, dtype=here.dtype, device=here.device)
        return tuple(value) if isinstance(here, tuple) else value

    return {key: restored(value, group.get(key)) for key, value in saved.items()}


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state_dict, by their plain names."""
    # A module may put anything into its state_dict through get_extra_state.
    held = model.state_dict().items()
    return {names.plain(name): value for name, value in held if isinstance(value, torch.Tensor)}
