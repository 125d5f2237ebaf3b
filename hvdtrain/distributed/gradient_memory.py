"""What a rank remembers of its gradients between steps, for compression with error feedback.

With strategies in which ranks step alone, the changes of weights between two exchanges take the place of gradients.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

ERROR = "mean.error"  # a kind, as in names of `rank_state`: the mean over ranks stays if their number changes
CHANGE = "sync/"  # begins the name of a weight whose changes are compressed; no parameter's own name begins with it

_T = TypeVar("_T")


class Memory(Generic[_T]):
    """Values of this rank, by kind and by parameter. What is put is pending until `commit`.

    A framework's subclass says how its tensors become arrays.

    Args:
        kinds: as in names of `rank_state`.
        names: of the parameters.
    """

    def __init__(self, kinds: Sequence[str], names: Iterable[str] = ()) -> None:
        self._kinds = tuple(kinds)
        self._keys: dict[str, str] = {}
        self._kept: dict[str, _T] = {}
        self._pending: dict[str, _T] = {}
        self.know(names)

    @property
    def nbytes(self) -> int:
        """The bytes that were committed."""
        return sum(value.nbytes for value in self._kept.values())  # type: ignore[attr-defined]

    def know(self, names: Iterable[str]) -> None:
        """Add these parameters to those of which `load` restores something."""
        self._keys |= {f"{kind}.{name}": name for name in names for kind in self._kinds}

    def get(self, kind: str, name: str, like: _T) -> _T | None:
        """Return a value that was committed, on the device and in the type of `like`; None if there is none."""
        held: Any = self._kept.get(f"{kind}.{name}")
        # A checkpoint of a run with other options may have another shape.
        return None if held is None or held.shape != like.shape else self.as_like(held, like)  # type: ignore[attr-defined]

    def put(self, kind: str, name: str, value: _T) -> None:
        """Replace a value if the step is taken."""
        self._pending[f"{kind}.{name}"] = value

    def commit(self) -> None:
        """Keep what is pending."""
        while self._pending:  # one by one: a thread may put others meanwhile
            key, value = self._pending.popitem()
            self._kept[key] = value

    def rollback(self, names: Iterable[str] | None = None) -> None:
        """Drop what is pending, of all parameters or of some."""
        dropped = None if names is None else set(names)
        for key in list(self._pending):
            if dropped is None or self._keys[key] in dropped:
                del self._pending[key]

    def reset(self) -> None:
        """Drop everything."""
        self._kept, self._pending = {}, {}

    def state(self) -> dict[str, NDArray[Any]]:
        """Return copies of what was committed."""
        return {key: self.to_array(value) for key, value in self._kept.items()}

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore what `state` returned, as far as it is there."""
        found = {key: self.from_array(arrays[key]) for key in self._keys if key in arrays}
        self._kept |= found
        for key in found:
            self._pending.pop(key, None)

    def as_like(self, held: _T, like: _T) -> _T:
        """Return `held` on the device and in the type of `like`."""
        raise NotImplementedError

    def to_array(self, value: _T) -> NDArray[Any]:
        """Return a copy on the host."""
        raise NotImplementedError

    def from_array(self, array: NDArray[Any]) -> _T:
        """Return a copy of an array as a value."""
        raise NotImplementedError


class ArrayMemory(Memory[NDArray[Any]]):
    """Values are NumPy's arrays."""

    def as_like(self, held: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
        """Return `held` in the type of `like`."""
        return held.astype(like.dtype, copy=False)

    def to_array(self, value: NDArray[Any]) -> NDArray[Any]:
        """Return a copy."""
        return np.array(value)

    def from_array(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a copy."""
        return np.array(array)


def first_directions(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return a parameter's first Q of PowerSGD: random numbers, the same on all ranks, in each run and framework."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, dtype=np.float32)
