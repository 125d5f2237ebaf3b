"""Call a PyDataset's on_epoch_begin and on_epoch_end, so that they do the same on all ranks."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np

from hvdtrain.distributed import agreement, rank_state
from hvdtrain.distributed.world import World

_SAMPLED = 4096  # values of an array, or items of a list, that ranks compare

# How many times each dataset's hooks were called, in all fits.
_calls: WeakKeyDictionary[keras.utils.PyDataset, int] = WeakKeyDictionary()


class EpochHooks:
    """The calls, in this order: on_epoch_begin, on_epoch_end, on_epoch_begin, ...

    Python's and NumPy's global generators are seeded by (seed, call) meanwhile, alike on all ranks, and then restored.
    A run that resumes in epoch 3 makes the calls of three epochs first. An epoch's on_epoch_end is called when the next
    epoch begins, where all ranks have read their last batch.
    """

    def __init__(self, data: keras.utils.PyDataset, *, world: World, seed: int) -> None:
        self._data, self._world, self._seed = data, world, seed
        plain, kind = keras.utils.PyDataset, type(data)
        self._needed = kind.on_epoch_begin is not plain.on_epoch_begin or kind.on_epoch_end is not plain.on_epoch_end
        self._before: int | None = None  # calls that were made before epoch 0

    def begin(self, epoch: int) -> None:
        """Make the calls up to the beginning of an epoch; a collective. DesyncError if ranks then differ."""
        if not self._needed:
            return
        made = _calls.get(self._data, 0)
        if self._before is None:  # this object may have made the calls of earlier epochs, before a resume or in a fit
            self._before = max(0, made + made % 2 - 2 * epoch)
        old = self._digests()
        with agreement.everywhere(world=self._world, name="epoch_hooks"):
            for call in range(made, self._before + 2 * epoch + 1):
                self._call(call)
                _calls[self._data] = call + 1
        # Not what the hooks leave alone: a dataset may hold its rank.
        changed = {name: value for name, value in self._digests().items() if value != old.get(name)}
        agreement.require_equal(
            {"length": len(self._data), **changed},
            world=self._world,
            what=f"{type(self._data).__name__} after on_epoch_end and on_epoch_begin",
            advice=(
                "There, draw from np.random or random, which are seeded alike on all ranks, or from a generator of the "
                "dataset's own that has a seed, such as np.random.default_rng(0)."
            ),
        )

    def _digests(self) -> dict[str, str]:
        return {name: _digest(value) for name, value in vars(self._data).items()} if self._world.size > 1 else {}

    def _call(self, call: int) -> None:
        state = int(np.random.default_rng([self._seed % 2**64, call]).integers(2**32))
        with rank_state.random_states_restored():
            random.seed(state)
            np.random.seed(state)  # noqa: NPY002 - the generator that people's datasets use
            (self._data.on_epoch_end if call % 2 else self._data.on_epoch_begin)()


def _digest(value: Any) -> str:
    """Return a text that differs where plain values do: integers, texts, arrays, lists, dicts, random generators.

    Not for a single float, which may be a time.
    """
    if isinstance(value, np.random.Generator):
        return _digest(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return _digest(value.get_state())
    if isinstance(value, random.Random):
        return _digest(value.getstate())
    if isinstance(value, Mapping):
        return _digest([*value.items()])
    if isinstance(value, list | tuple | range):
        step = -(-len(value) // _SAMPLED) or 1
        return f"{len(value)} items, crc32 {zlib.crc32(''.join(map(_digest, value[::step])).encode())}"
    if isinstance(value, int | str | bytes | None):
        return repr(value)
    shape: Any = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "__array__") and shape:
        return f"{tuple(shape)}, crc32 {zlib.crc32(repr(_sample(value)).encode())}"
    return type(value).__name__


def _sample(array: Any) -> list[Any]:
    rows = array[:: -(-len(array) // _SAMPLED) or 1]
    flat = np.asarray(rows).reshape(-1)
    return list(flat[:: -(-len(flat) // _SAMPLED) or 1].tolist())
