"""Check that all ranks hold the same variables, and give every rank the root's."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.distributed import world
from hvdtrain.distributed.agreement import first_difference
from hvdtrain.errors import DesyncError
from hvdtrain.keras import basics, ops
from hvdtrain.keras.backends import backend_module, room_for
from hvdtrain.keras.reduction import identity, small_together
from hvdtrain.keras.shards import Slot, shards_of

# A bound on the extra memory of a graph; large enough that the number of messages does not matter.
CHUNK_BYTES = 64 * 2**20
_PIECE_BYTES = 2**21  # that are sent at once, outside of graphs


def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, process_set: Any | None = None, inplace: bool = True
) -> None:
    """Assign the root's values to `variables` on every rank, bit for bit, whatever their dtypes.

    Of an optimizer state in shards, what the root has loaded is divided; otherwise each rank keeps its part.

    Call it outside of compiled functions, on every rank, with the same variables in the same order, or all ranks raise
    DesyncError.

    Args:
        variables: Keras variables, or the backend's own with `assign`.
        root_rank: rank whose values all ranks get.
        process_set: ranks that take part; None means all.
        inplace: must be True; Horovod has the argument, and this is the only way there is here.
    """
    if not inplace:
        raise ValueError("Variables are always assigned in place. Received: inplace=False")
    variables = list(variables)
    size = world.current().size
    if not 0 <= root_rank < size:
        raise ValueError(f"root_rank must be a rank in [0, {size}). Received: root_rank={root_rank}")
    sharded = shards_of(variables)
    if basics.members(process_set) <= 1 or not variables:
        for shards in sharded:  # one rank of an elastic job
            shards.spread(root_rank)
        return
    ops.refuse_graph("keras.broadcast_variables")
    variables = [v for v in variables if not isinstance(v, Slot)]
    agree(variables, what="variables to broadcast", process_set=process_set)
    sizes = [num_bytes(v) for v in variables]
    for bucket in small_together(sizes, limit=_PIECE_BYTES, room=_PIECE_BYTES):
        if sizes[bucket[0]] < _PIECE_BYTES:
            _broadcast_together([variables[i] for i in bucket], root_rank, process_set)
        else:
            _broadcast_in_pieces(variables[bucket[0]], root_rank, process_set)
    for shards in sharded:
        shards.spread(root_rank)


def broadcast_model(model: Any, optimizer: Any | None = None, root_rank: int = 0, skip: Sequence[Any] = ()) -> None:
    """Give every rank the root's weights and optimizer state.

    The states of random seed generators and the counts of metrics are not broadcast: with equal seeds all ranks
    would drop the same units for different samples, and a metric counts what its rank has seen.

    Args:
        model: a built keras.Model.
        optimizer: built; None means the model's, if it has one.
        root_rank: rank whose values all ranks get.
        skip: variables that are not broadcast.
    """
    optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
    variables = [*model.weights, *(optimizer.variables if optimizer is not None else [])]
    skipped = {identity(v) for v in skip}
    broadcast_variables([v for v in variables if identity(v) not in skipped], root_rank)


def broadcast_global_variables(root_rank: int, model: Any | None = None) -> None:
    """Give every rank the root's weights and optimizer state of `model`; without one, a ValueError.

    Horovod's function of this name takes all variables of a TensorFlow 1 session. Keras 3 has none.
    """
    if model is None:
        raise ValueError(
            "Keras 3 has no global variables. Pass the model: broadcast_global_variables(root_rank, model)"
        )
    broadcast_model(model, root_rank=root_rank)


def num_bytes(variable: Any) -> int:
    """Return the size of a variable's value."""
    return int(math.prod(variable.shape) * np.dtype(keras.backend.standardize_dtype(variable.dtype)).itemsize)


def path(variable: Any) -> str:
    """Return a variable's path, or its name where it is not Keras's own."""
    return str(getattr(variable, "path", getattr(variable, "name", "variable")))


def without_counters(name: str) -> str:
    """Return `name` without the numbers that Keras counts up ("dense_3/kernel"): ranks may have counted differently."""
    return re.sub(r"_\d+(?=/|$|\.)", "", name)


def agree(variables: Sequence[Any], *, what: str, offer: int = 0, process_set: Any | None = None) -> int:
    """Return the greatest `offer` of all ranks, once they are known to hold equal variables; a collective.

    Variables are compared in order by path, shape and dtype, never by value. Nothing is sent but a digest, unless ranks
    differ: then every rank raises DesyncError, which names the first variable that differs.
    """

    def gather(array: Any, name: str) -> Any:
        return ops.call("allgather", array, name=f"hvdtrain.{name}", process_set=process_set)

    mine = [[path(v), [int(n) for n in v.shape], str(keras.backend.standardize_dtype(v.dtype))] for v in variables]
    digest = hashlib.sha256(json.dumps([_normal(each) for each in mine]).encode()).digest()
    rows = gather(np.frombuffer(digest + offer.to_bytes(8, "little"), np.uint8).reshape(1, -1), "agree")
    if (rows[:, :32] == rows[0, :32]).all():
        return max(int.from_bytes(row[32:].tobytes(), "little") for row in rows)
    lines = gather(np.frombuffer(json.dumps(mine).encode() + b"\n", np.uint8), "disagree").tobytes().splitlines()
    number, index, a, b = first_difference([*map(json.loads, lines)], _normal) or (0, 0, None, None)
    raise DesyncError(
        f"Ranks hold different {what}: variable {index} is {_text(a)} on the first rank and {_text(b)} on rank number "
        f"{number} of the set (seen from rank {world.current().rank}). Build the same model on every rank."
    )


def _normal(described: list[Any]) -> list[Any]:  # [path, shape, dtype]
    return [without_counters(described[0]), *described[1:]]


def _text(described: list[Any] | None) -> str:
    return "absent" if described is None else f"{described[0]} of shape {tuple(described[1])}, {described[2]}"


def _broadcast_in_pieces(variable: Any, root_rank: int, process_set: Any | None) -> None:
    """Assign the root's value of a large variable."""
    is_root = world.current().rank == root_rank
    value = np.require(backend_module().on_host(variable), requirements="C") if is_root else room_for(variable)
    flat, length = value.reshape(-1), _PIECE_BYTES // value.itemsize
    for begin in range(0, flat.size, length):
        received = _from_root(flat[begin : begin + length].view(np.uint8), root_rank, process_set)
        if not is_root:
            flat[begin : begin + length] = received.view(flat.dtype)
    if not is_root:
        backend_module().give(variable, value)


def _from_root(data: Any, root_rank: int, process_set: Any | None) -> Any:
    # As bytes, so that integers, booleans, bfloat16 and NaNs all arrive as they were.
    name = "hvdtrain.broadcast_variables"
    return ops.call("broadcast", data, root_rank, name=name, process_set=process_set)


def _broadcast_together(variables: list[Any], root_rank: int, process_set: Any | None) -> None:
    values = [np.require(backend_module().on_host(v), requirements="C") for v in variables]
    data = np.concatenate([v.reshape(-1).view(np.uint8) for v in values])
    received = _from_root(data, root_rank, process_set)
    if world.current().rank == root_rank:
        return
    parts = np.split(received, np.cumsum([v.nbytes for v in values])[:-1])
    for variable, value, part in zip(variables, values, parts, strict=True):
        variable.assign(part.view(value.dtype).reshape(value.shape))


def sync_from_jax(model: Any) -> None:
    """Put values back into the model's variables: while Keras trains on JAX, they are elsewhere."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()
