"""The state of one rank in the middle of a run: random states, running metrics, statistics not yet synchronized.

A checkpoint contains it for every rank, so that a resumed run equals one that never stopped. If the number of ranks has
changed, the names say what happens to a value: "random.x" stays with the rank of the same number, and new ranks get
"random.data.x" if it was equal on all ranks; of "sum.x" the sum over ranks is preserved, "mean.x" and "max.x" become
the mean and the maximum on all ranks, and rank 0 gets all of "cat.x", one after the other.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from hvdtrain.distributed import agreement, checksums
from hvdtrain.distributed.buckets import fill_in_order
from hvdtrain.distributed.world import World
from hvdtrain.system import safe_arrays

Arrays = dict[str, NDArray[Any]]

OF_DATA = "random.data."  # states of the random generators that data hold
_SHARED = ("mean.", "max.")
_LARGE_BYTES, _PIECE_BYTES = 2**22, 2**21
_AT_ONCE_BYTES = 2**26  # that `gather` sends in one collective, unless one rank has more
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
    data = b"" if is_own else _pack(mine)
    lengths = world.allgather(np.array([len(data)], np.int64), name="rank_state.lengths").tolist()
    ranks: dict[int, Arrays] = {}
    # One rank after the other sends if they send much, because all ranks receive it.
    for turn in fill_in_order(lengths, _AT_ONCE_BYTES):
        parts = world.allgather_bytes(data if world.rank in turn else b"", name="rank_state")
        if world.is_root or everywhere:
            ranks |= {rank: _unpack(parts[rank]) for rank in turn}
    if is_own:
        ranks[world.rank] = mine
    return {f"{rank}/{name}": array for rank, arrays in sorted(ranks.items()) for name, array in arrays.items()}


def scatter(
    saved: Mapping[str, NDArray[Any]],
    *,
    world: World,
    nbytes: Callable[[str], int] | None = None,
    take: Callable[[str], NDArray[Any]] | None = None,
) -> Arrays:
    """Return this rank's part of what `gather` returned on the root; the number of ranks may change. A collective.

    Args:
        saved: large arrays of it are read one by one.
        world: the ranks.
        nbytes: returns the size of an array, by its name; by default it is read.
        take: returns an array of `saved` in memory that is nobody else's; by default a copy.

    Raises:
        Exception: on the root, an error that it had when it read an array; an OtherRankError on the other ranks.
    """
    size_of = nbytes or (lambda name: saved[name].nbytes)
    large: list[str] = []
    small: Arrays = {}

    def read() -> None:
        large.extend(sorted({_rest(name) for name in saved if size_of(name) > _LARGE_BYTES}))
        small.update({name: saved[name] for name in saved if _rest(name) not in large})

    agreement.together(read, world=world, name="rank_state.read")
    shares = _shares(saved, large, take or (lambda name: np.array(saved[name])), size=world.size)
    return _scatter_small(small, world=world) | _scatter_large(shares, world=world)


def _rest(name: str) -> str:
    return name.partition("/")[2]


def _shares(
    saved: Mapping[str, Any], names: Sequence[str], take: Callable[[str], NDArray[Any]], *, size: int
) -> Iterator[tuple[str, int | None, NDArray[Any]]]:
    """Yield each array of these names, with the rank of `size` that gets it; None for all ranks."""
    before = sorted({int(name.partition("/")[0]) for name in saved})
    for name in names:
        found = [number for number in before if f"{number}/{name}" in saved]
        is_shared = name.startswith(_SHARED)
        if is_shared and found == [0]:
            yield name, None, take(f"0/{name}")
        elif len(before) == size:
            for rank in before if is_shared else found:
                yield name, rank, take(f"{rank if rank in found else 0}/{name}")
        else:
            held = {number: take(f"{number}/{name}") for number in found}
            everywhere = {name: held[0]} if is_shared else {}
            parts = [{name: held[number]} if number in held else everywhere for number in before]
            for rank in range(1 if is_shared else size):
                for array in combine(parts, rank=rank, size=size).values():
                    yield name, None if is_shared else rank, array


def _scatter_large(shares: Iterator[tuple[str, int | None, NDArray[Any]]], *, world: World) -> Arrays:
    """Return this rank's arrays of the root's `_shares`, which are sent one by one, in pieces; a collective."""
    mine: Arrays = {}
    array: NDArray[Any] | None = None  # the root's, which is being sent

    def next_header() -> dict[str, Any] | None:
        nonlocal array
        name, rank, array = next(shares, ("", None, None))
        return array if array is None else {"name": name, "rank": rank, "shape": array.shape, "dtype": array.dtype.str}

    while (header := agreement.together(next_header, world=world, name="rank_state.large")) is not None:
        is_mine = header["rank"] in (None, world.rank)
        whole = _send(array, tuple(header["shape"]), np.dtype(header["dtype"]), keep=is_mine, world=world)
        if is_mine:
            mine[header["name"]] = whole
        array = None
        del whole
    return mine


def _send(
    array: NDArray[Any] | None, shape: tuple[int, ...], dtype: np.dtype[Any], *, keep: bool, world: World
) -> NDArray[Any]:
    """Send the root's array in pieces; return it, or any array where it is not to be kept. A collective."""
    whole = np.empty(shape if keep else (0,), dtype) if array is None else array
    numbers = whole.reshape(-1)
    count, length = math.prod(shape), max(1, _PIECE_BYTES // dtype.itemsize)
    for begin in range(0, count, length):
        end = min(begin + length, count)
        sent = np.zeros(end - begin, dtype) if array is None else array.reshape(-1)[begin:end]
        received = world.broadcast(sent, name="rank_state.piece")
        if array is None and keep:
            numbers[begin:end] = received
    return whole


def _scatter_small(saved: Arrays, *, world: World) -> Arrays:
    size_bytes = sum(array.nbytes for array in saved.values()) if world.is_root else 0
    if not world.broadcast_object(size_bytes > _AT_ONCE_BYTES, name="rank_state.turns"):
        return _combined(broadcast(saved, world=world), rank=world.rank, size=world.size)
    mine: Arrays = {}
    for rank in range(world.size):  # one after the other, so that no rank ever holds the states of all
        found = broadcast(_combined(saved, rank=rank, size=world.size) if world.is_root else {}, world=world)
        mine = found if rank == world.rank else mine
    return mine


def _combined(saved: Arrays, *, rank: int, size: int) -> Arrays:
    """Return the state of rank `rank` of `size` from what `gather` returned."""
    ranks: dict[int, Arrays] = {}
    for name, array in saved.items():
        number, _, rest = name.partition("/")
        ranks.setdefault(int(number), {})[rest] = array
    if not ranks:
        return {}
    everywhere = {name: array for name, array in ranks[0].items() if name.startswith(_SHARED)}
    return combine([everywhere | ranks[number] for number in sorted(ranks)], rank=rank, size=size)


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
