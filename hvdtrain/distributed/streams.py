"""Random streams: each rank has its own, so that ranks drop other units and augment in other ways.

Scripts seed all ranks alike. A generator whose state equals that of a lower rank gets a new seed, from this state and
the rank; rank 0 keeps all of its states. What ranks have to draw alike, such as the order of data that each rank
iterates whole, is drawn from a stream that a common key and the epoch determine.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.distributed.rank_state import Arrays, random_states
from hvdtrain.distributed.world import World

Seeds = Mapping[str, int]  # new seeds of 63 bits, by the generators' names in `rank_state`
Digests = dict[str, int]  # of generators' states, by the same names
# What returns a generator's state, what restores it, and what seeds it.
Generator = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]

_GAUSS = "_gauss"  # ends the name of the second part of a state

_key: int | None = None  # of the fit that runs; as global as the generators are
_unseeded: int | None = None


def generators_in(states: Arrays) -> list[str]:
    """Return the names of the generators to which these states belong."""
    return sorted({name.removesuffix(_GAUSS) for name in states if name.startswith("random.")})


def digests(states: Arrays, *, world: World) -> list[Digests]:
    """Return each rank's digests of the generators in `states`, which `rank_state` has named; a collective."""
    generators = generators_in(states)

    def digest(name: str) -> int:
        parts = [states[each] for each in (name, name + _GAUSS) if each in states]
        return _hash(name, *(part.tobytes() for part in parts))

    return world.allgather_object({name: digest(name) for name in generators}, name="streams")


def own_seeds(found: Sequence[Digests], *, rank: int, step: int = 0, every: bool = False) -> dict[str, int]:
    """Return seeds for those generators of `rank` that are in the state of a lower rank's.

    Args:
        found: what `digests` returned.
        rank: this rank.
        step: of the run; a rank that joins later does not draw what an earlier one with its number has drawn.
        every: return seeds for all generators of `rank`.
    """
    lower = found[:rank]
    chosen = [
        (name, mine) for name, mine in found[rank].items() if every or any(each.get(name) == mine for each in lower)
    ]
    return {name: _hash(name, mine, rank, step) for name, mine in chosen}


def alike(found: Sequence[Digests]) -> set[str]:
    """Return the names of the generators that have the same state on all ranks."""
    return {name for name, first in found[0].items() if all(each.get(name) == first for each in found)}


def states_of(generators: set[str], states: Arrays) -> Arrays:
    """Return the states that belong to these generators."""
    return {name: array for name, array in states.items() if name.removesuffix(_GAUSS) in generators}


def common_seeds(generators: Iterable[str], key: int, *parts: str | int) -> dict[str, int]:
    """Return seeds for these generators that the key and `parts` determine: equal on all ranks."""
    return {name: _hash(name, key, *parts) for name in generators}


def key_of(found: Sequence[Digests]) -> int:
    """Return the key, of 63 bits, of the streams that ranks share."""
    return _hash(*(part for item in sorted(found[0].items()) for part in item))


def reseed(seeds: Seeds) -> None:
    """Seed Python's and NumPy's global generators, as far as they are in `seeds`."""
    if "random.python" in seeds:
        random.seed(seeds["random.python"])
    if "random.numpy" in seeds:
        _seed_numpy(seeds["random.numpy"])


def separate(
    states: Arrays,
    reseed_framework: Callable[[Seeds], None],
    *,
    world: World,
    step: int = 0,
    every: bool = False,
    in_threads: bool = False,
) -> list[Digests]:
    """Give this rank random streams of its own; return what the ranks' generators were before; a collective.

    `states` are those of the framework's generators, which `reseed_framework` seeds by their names there. For `step`
    and `every` see `own_seeds`. With `in_threads`, Python's and NumPy's generators stay as they are.
    """
    found = digests(random_states() | states, world=world)
    if world.grid is None:
        seeds = own_seeds(found, rank=world.rank, step=step, every=every)
    else:  # one rank's inputs are another one's targets, so ranks with the same samples draw alike
        seeds = {name: _hash(name, first, world.grid.data_rank, step) for name, first in found[0].items()}
    if not in_threads:
        reseed(seeds)
    reseed_framework(seeds)
    return found


def are_alike_in_replicas(states: Arrays, *, world: World) -> bool:
    """Return whether the ranks of a Grid that have the same samples have these states alike; a collective."""
    found = digests(states, world=world)
    data_ranks = world.allgather_object(world.grid.data_rank, name="streams.data")
    first: dict[int, Digests] = {}
    return all(first.setdefault(number, each) == each for number, each in zip(data_ranks, found, strict=True))


def share(key: int | None, *, unseeded: int | None = None) -> None:
    """Set the key of the streams that ranks share from now on.

    Args:
        key: None if the generators themselves are alike, or meant not to be.
        unseeded: an epoch whose data are drawn from the generators' states as they are when the epoch begins: it began
            before there was a key, and the caller has made these states equal on all ranks.
    """
    global _key, _unseeded
    _key, _unseeded = key, unseeded


def draw_alike(start: Callable[[], Iterator[Any]], *, epoch: int, generators: Sequence[Generator]) -> Iterator[Any]:
    """Iterate what `start` returns, which draws from global generators, alike on all ranks.

    Args:
        start: returns the iterator; called at once.
        epoch: each has a stream of its own.
        generators: a framework's global ones, besides Python's and NumPy's.
    """
    if _key is None:
        return start()
    key, found = _key, [*_GLOBAL, *generators]
    aside = _Aside(found)

    def seed() -> None:
        for number, (_, _, seed_one) in enumerate(found):
            seed_one(_hash("data", key, epoch, number))

    if epoch != _unseeded:
        aside.run(seed)
    iterator = aside.run(start)
    return iter(lambda: aside.run(lambda: next(iterator, _END)), _END)


_END = object()


class _Aside:
    """States of global generators that only `run` uses; in between the generators are as before."""

    def __init__(self, generators: Sequence[Generator]) -> None:
        self._generators = generators
        self._states = self._get()

    def run(self, work: Callable[[], Any]) -> Any:
        """Return what `work` returns, which draws from these states."""
        before = self._get()
        self._set(self._states)
        try:
            return work()
        finally:
            self._states = self._get()
            self._set(before)

    def _get(self) -> list[Any]:
        return [get() for get, _, _ in self._generators]

    def _set(self, states: list[Any]) -> None:
        for (_, restore, _), state in zip(self._generators, states, strict=True):
            restore(state)


def _seed_numpy(seed: int) -> None:
    np.random.seed([seed % 2**32, seed >> 32])  # noqa: NPY002 - what users and their libraries draw from


_GLOBAL: list[Generator] = [
    (random.getstate, random.setstate, random.seed),
    (np.random.get_state, np.random.set_state, _seed_numpy),
]


def _hash(*parts: str | bytes | int) -> int:
    """Return 63 bits: a signed integer of 64 bits can hold them."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(b"%d:" % len(data) + data)
    return int.from_bytes(digest.digest()[:8], "little") >> 1
