"""The state of a training as the contents of a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapter import HostArrays, State, host_arrays
from hvdtrain.callbacks.base import parts_of, without_arrays
from hvdtrain.checkpoint import Contents, Draft, Kind
from hvdtrain.distributed import agreement
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.rank_state import Arrays
from hvdtrain.distributed.world import World

# Prefixes of the names in `State.arrays`, and the files that they go to.
_FILES = ("model", "optimizer", "sync")
CALLBACKS = "callbacks"  # the file of callbacks' arrays


def unpack(contents: Contents) -> State:
    """Return the state that `pack` was given. Arrays of a file are read when they are asked for."""
    arrays = HostArrays({})
    for file in _FILES:
        group = host_arrays(contents.arrays.get(file, {}))
        arrays |= group.renamed({f"{file}.{key}": key for key in group})
    return State(arrays, contents.meta["adapter"], elsewhere=contents.elsewhere)


def with_callbacks(state: State, states: Sequence[Sequence[Any]]) -> State:
    """Return the state with those arrays of callbacks that ranks hold in parts."""
    parts = {f"{CALLBACKS}.{name}": each for name, each in parts_of(states).items()}
    return replace(state, sharded=state.sharded | parts)


def pack(
    state: State, ranks: Arrays, meta: dict[str, Any], *, world: World, copy: bool, built: dict[str, str] | None = None
) -> Contents:
    """Return the contents of a checkpoint, copied if training continues.

    `ranks` is the result of `rank_state.gather`.

    Frozen weights are left out as long as they are what the script has `built`.
    """
    files: dict[str, dict[str, NDArray[Any]]] = {name: {} for name in _FILES}
    left_out: dict[str, tuple[NDArray[Any], str]] = {}
    for name, array in state.arrays.items():
        file, key = _place(name)
        value = np.array(array, order="C") if copy else np.asarray(array)  # as it is written, not to be copied again
        if name in state.frozen and built and name in built:
            left_out[key] = value, built[name]
        else:
            files[file][key] = value
    callbacks, arrays = without_arrays(meta["callbacks"])  # `with_callbacks` has the others
    meta = {**meta, "callbacks": callbacks, "adapter": state.meta, "world_size": DataRanks(world).size}
    # A deep copy, because it contains the History, which grows.
    if not files["sync"]:  # only a strategy has state of its own
        del files["sync"]
    return Contents(
        {**files, "ranks": ranks} | ({CALLBACKS: arrays} if arrays else {}),
        deepcopy(meta) if copy else meta,
        trained=frozenset(name.removeprefix("model.") for name in state.trained),
        left_out=left_out,
    )


def begin(
    place: Path,
    state: State,
    ranks: Arrays,
    meta: dict[str, Any],
    *,
    world: World,
    copy: bool = False,
    built: dict[str, str] | None = None,
) -> Draft:
    """Begin to write a checkpoint; see `pack`. It awaits the arrays of which ranks hold parts.

    Without a copy, the other arrays are written here, one by one.
    """
    if copy:
        return Draft(place, pack(state, ranks, meta, world=world, copy=True, built=built))
    left_out = state.frozen & (built or {}).keys()
    kept = replace(state, arrays={name: state.arrays[name] for name in state.arrays if name in left_out})
    kinds = {name: state.kind(name) for name in state.arrays if name not in left_out}
    awaited: dict[str, dict[str, Kind]] = {}
    for name, kind in (kinds | {name: each.kind for name, each in state.sharded.items()}).items():
        file, key = _place(name)
        awaited.setdefault(file, {})[key] = kind
    draft = Draft(place, pack(kept, ranks, meta, world=world, copy=False, built=built), awaited)
    draft.put_own()
    for name in kinds:
        draft.put(*_place(name), state.arrays[name])
    return draft


def write(state: State, begin: Callable[[], Draft], finish: Callable[[Draft], None], *, world: World) -> None:
    """Write a checkpoint on the root: `begin` it, put the arrays of which ranks hold parts, then `finish` it.

    A collective call. If the root cannot write, the ranks still gather all arrays, and then every rank raises.
    """
    if not state.sharded:
        agreement.together(lambda: finish(begin()), world=world, name="save")
        return
    drafts: list[Draft] = []
    agreement.together(lambda: drafts.append(begin()), world=world, name="save.begin")
    try:
        for name, each in state.sharded.items():
            whole = each.gather(False)
            for draft in drafts:
                draft.put(*_place(name), np.asarray(whole))
            del whole  # before the next one comes
        agreement.together(lambda: finish(drafts.pop()), world=world, name="save")
    finally:
        for draft in drafts:
            draft.close()


def _place(name: str) -> tuple[str, str]:
    """Return the file of an array, and its name there."""
    file, _, key = name.partition(".")
    return file, key
