"""The state of one rank in the middle of a run: random states, running metrics, statistics not yet synchronized.

A checkpoint contains it for every rank, so that a resumed run equals one that never stopped. If the number of ranks has
changed, the names say what happens to a value: "random.x" stays with the rank of the same number, and new ranks get
"random.data.x" if it was equal on all ranks; of "sum.x" the sum over ranks is preserved, "mean.x" and "max.x" become
the mean and the maximum on all ranks, and rank 0 gets all of "cat.x", one after the other.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from hvdtrain.distributed import checksums
from hvdtrain.distributed.world import World
from hvdtrain.system import safe_arrays

Arrays = dict[str, NDArray[Any]]

OF_DATA = "random.data."  # states of the random generators that data hold
_SHARED = ("mean.", "max.")
_MT_WORDS = 624  # the state of a Mersenne Twister, which Python and numpy.random both use


def random_states() -> Arrays:
    """Return the states of Python's and NumPy's global random generators; of NumPy's only where it is in use."""
    version, words, gauss = random.getstate()
    states = {
        "random.python": np.array(words, np.uint64),
        "random.python_gauss": np.array([version, gauss is not None, gauss or 0.0], np.float64),
    }
    if "numpy.random" in sys.modules:
        # The global one, which users and their libraries draw from; hvdtrain does not.
        _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
        states["random.numpy"] = np.append(keys, position).astype(np.uint64)
        states["random.numpy_gauss"] = np.array([has_gauss, cached], np.float64)
    return states


def set_random_states(states: Arrays) -> None:
    """Restore what `random_states` returned; generators that are not in it stay as they are."""
    if "random.python" in states:
        version, has_gauss, gauss = states["random.python_gauss"].tolist()
        random.setstate((int(version), tuple(states["random.python"].tolist()), gauss if has_gauss else None))
    if "random.numpy" in states:
        words, (has_gauss, cached) = states["random.numpy"], states["random.numpy_gauss"].tolist()
        keys, position = words[:_MT_WORDS].astype(np.uint32), int(words[_MT_WORDS])
        np.random.set_state(("MT19937", keys, position, int(has_gauss), float(cached)))  # noqa: NPY002


@contextmanager
def random_states_restored() -> Iterator[None]:
    """Restore the states of `random_states` when the block ends."""
    before = random_states()
    try:
        yield
    finally:
        set_random_states(before)


def gather(mine: Arrays, *, world: World, everywhere: bool = False) -> Arrays:
    """Return all ranks' values as {"<rank>/<name>": array} on the root, and nothing on the others; a collective.

    With `everywhere`, all ranks get them. Values "mean.x" and "max.x" that are equal on all ranks are included once, as
    rank 0's, because masks and tables of models are buffers too. The root's own arrays are returned as they are.
    """
    names = sorted(name for name in mine if name.startswith(_SHARED))
    same = checksums.equal_on_ranks((mine[name] for name in names), ranks=world, name="rank_state.hashes")
    if not world.is_root:
        equal = {name for name, is_same in zip(names, same, strict=True) if is_same}
        mine = {name: array for name, array in mine.items() if name not in equal}
    is_own = world.is_root and not everywhere  # then the others need not receive them
    parts = world.allgather_bytes(b"" if is_own else _pack(mine), name="rank_state")
    if not (world.is_root or everywhere):
        return {}
    ranks = [mine if is_own and rank == world.rank else _unpack(part) for rank, part in enumerate(parts)]
    return {f"{rank}/{name}": array for rank, arrays in enumerate(ranks) for name, array in arrays.items()}


def scatter(saved: Arrays, *, world: World) -> Arrays:
    """Return this rank's part of what `gather` returned on the root; the number of ranks may change. A collective."""
    ranks: dict[int, Arrays] = {}
    for name, array in broadcast(saved, world=world).items():
        number, _, rest = name.partition("/")
        ranks.setdefault(int(number), {})[rest] = array
    if not ranks:
        return {}
    everywhere = {name: array for name, array in ranks[0].items() if name.startswith(_SHARED)}
    return combine([everywhere | ranks[number] for number in sorted(ranks)], rank=world.rank, size=world.size)


def broadcast(arrays: Arrays, *, world: World) -> Arrays:
    """Return the root's arrays on all ranks; a collective."""
    return _unpack(world.allgather_bytes(_pack(arrays) if world.is_root else b"", name="rank_state")[0])


def combine(before: Sequence[Arrays], *, rank: int, size: int) -> Arrays:
    """Return the state of rank `rank` of `size`, from the states `before` of the earlier ranks."""
    if len(before) == size:
        return before[rank]
    rules: dict[str, Callable[[list[NDArray[Any]]], NDArray[Any]]] = {
        "sum": lambda values: np.sum(values, axis=0) if rank == 0 else np.zeros_like(values[0]),
        "mean": _mean,
        "max": lambda values: np.max(values, axis=0),
        "cat": lambda values: np.concatenate(values) if rank == 0 else values[0][:0],
    }
    mine = {}
    for name in before[0]:
        rule = rules.get(name.partition(".")[0])
        if rule is not None:
            mine[name] = np.asarray(rule([each[name] for each in before]))  # NumPy makes scalars of 0-d arrays
        elif rank < len(before):
            mine |= {name: before[rank][name]} if name in before[rank] else {}  # some are the root's alone
        elif OF_DATA in name and len({each[name].tobytes() for each in before if name in each}) == 1:
            mine[name] = before[0][name]
    return mine


def _mean(values: list[NDArray[Any]]) -> NDArray[Any]:
    """Return the mean; what is equal on all ranks, such as a mask or a table, stays as it is, bit for bit."""
    if all(each.tobytes() == values[0].tobytes() for each in values):
        return values[0]
    dtype = np.complex128 if values[0].dtype.kind == "c" else np.float64
    return np.asarray(np.mean(values, axis=0, dtype=dtype).astype(values[0].dtype))


def _pack(arrays: Arrays) -> bytes:
    return save(safe_arrays.encoded(arrays))


def _unpack(data: bytes) -> Arrays:
    return safe_arrays.decoded(load(data)) if data else {}
