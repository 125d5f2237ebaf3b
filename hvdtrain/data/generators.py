"""Find, save and restore the sources of the data's order: random generators, and samplers that change.

Python's, NumPy's and torch's global generators are left out: `rank_state` and adapters save these.
"""

from __future__ import annotations

import json
import random
import sys
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.attributes import Attributes
from hvdtrain.errors import CheckpointError

# Of a DataLoader: what makes a batch, perhaps in its workers, and what draws the order.
_BATCH, _ORDER = ("dataset", "collate_fn"), ("generator", "sampler", "batch_sampler")
_MOST_OBJECTS, _MOST_ITEMS = 10_000, 1000  # so many are looked at: at most 0.1 s; a longer list holds samples
_LEAVES = (str, bytes, int, float, complex, type(None), range, np.ndarray, np.generic, ModuleType)
_OF_LIBRARIES = ("torch", "numpy", "builtins", "typing", "collections", "abc")  # their classes hold no generators


class Generators:
    """The random generators that some objects reach, by path, such as "sampler.generator".

    Args:
        roots: the objects, by name.
        replays: True if a resumed epoch reads again what was read before: that restores the generators, too.
        changing: names of roots below which objects that can be iterated may change in each epoch, and are saved, too.
        is_order_shared: True if another rank's order is used, so that changes below a sampler are not saved.

    Attributes:
        unsaved: what a checkpoint cannot hold, each as a noun.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        *,
        replays: bool = False,
        changing: Container[str] = (),
        is_order_shared: bool = False,
    ) -> None:
        self.replays = replays
        self.unsaved: list[str] = []
        self._found: dict[str, Any] = {}
        self._changing: dict[str, Attributes] = {}
        self._is_order_shared = is_order_shared
        for path, value in reached(roots):
            if isinstance(value, Iterator) and not path.startswith(_BATCH):
                self.unsaved.append(f"the place of the iterator {path}")
            elif _is_generator(value):
                try:
                    _state(value)
                    self._found[path] = value
                except NotImplementedError:
                    self.unsaved.append(f"{path}, since a {type(value).__name__} has no state")
            elif path.partition(".")[0] in changing and _is_users_iterable(value):
                self._changing[path] = Attributes(value, only_scalars=path.startswith(_BATCH))

    @property
    def paths(self) -> list[str]:
        """The paths of the generators. One that several objects reach has the path of the first."""
        return list(self._found)

    def states(self) -> dict[str, NDArray[np.uint8]]:
        """Return as bytes the generators' states, and what has changed in objects that change."""
        saved = {
            path: each for path, each in self._changing.items() if path.startswith(_BATCH) or not self._is_order_shared
        }
        changed = {path: state for path, each in saved.items() if (state := each.state())}
        found = {path: _state(generator) for path, generator in self._found.items()}
        return found | {path: _as_bytes(state) for path, state in changed.items()}

    def set_states(self, states: Mapping[str, NDArray[Any]]) -> None:
        """Restore what `states` returned, as far as it is there; objects that it has no state of had not changed."""
        for path, each in self._changing.items():
            each.set_state(json.loads(states[path].tobytes()) if path in states else {})
        for path, generator in self._found.items():
            if path in states:
                try:
                    _set_state(generator, states[path])
                except (KeyError, RuntimeError, TypeError, ValueError) as error:
                    raise CheckpointError(
                        f"The checkpoint holds the state of another generator for {path}. Received: a "
                        f"{type(generator).__name__}. Give the data the generators that the run began with. ({error})"
                    ) from error

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Restore the states when the block ends."""
        before = self.states()
        yield
        self.set_states(before)

    def seed(self, numbers: Sequence[int]) -> None:
        """Seed each generator with the numbers and its place."""
        for place, generator in enumerate(self._found.values()):
            _seed(generator, np.random.SeedSequence(numbers, spawn_key=(place,)))


def generators_of(data: Any, *, replays: bool, is_root: bool) -> Generators:
    """Return the generators of a DataLoader or of other data, and its samplers and streams that may change."""
    is_loader = hasattr(data, "dataset") and hasattr(data, "sampler")
    dataset = data.dataset if is_loader else data
    changing = {*_ORDER}
    if is_stream(dataset) and not getattr(data, "num_workers", 0):
        changing.add("dataset")  # workers change copies
    how: dict[str, Any] = {"replays": replays, "changing": changing, "is_order_shared": not (is_root or replays)}
    if not is_loader:
        return Generators({"dataset": data}, **how)
    found = Generators({name: getattr(data, name, None) for name in (*_BATCH, *_ORDER)}, **how)
    of_workers = [path for path in found.paths if path.startswith(_BATCH)]
    if replays and of_workers and getattr(data, "persistent_workers", False):  # others begin each epoch as copies
        found.unsaved.append(f"what persistent_workers have drawn from {', '.join(of_workers)}")
    return found


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset is torch's IterableDataset."""
    return any(base.__name__ == "IterableDataset" for base in type(dataset).__mro__)


def reached(
    roots: Mapping[str, Any], *, through: Callable[[Any], bool] = lambda value: True
) -> Iterator[tuple[str, Any]]:
    """Yield each object that the roots reach and `through` accepts, once, with its path; the nearest first."""
    seen: dict[int, Any] = {}
    pending = deque(roots.items())
    while pending and len(seen) < _MOST_OBJECTS:
        path, value = pending.popleft()
        if not isinstance(value, _LEAVES) and id(value) not in seen and through(value):
            seen[id(value)] = value  # held: another object could get its id
            yield path, value
            parts = ((f"{path}.{name}", each) for name, each in _parts(value) if not isinstance(each, _LEAVES))
            pending.extend(islice(parts, max(0, _MOST_OBJECTS - len(pending))))


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, MethodType):
        return [("self", value.__self__), ("function", value.__func__)]
    if isinstance(value, partial):
        return [("function", value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        if len(value) > _MOST_ITEMS:
            return []
        return value.items() if isinstance(value, dict) else enumerate(value)
    if isinstance(value, type):
        return _of_class(value)
    try:
        return [*vars(value).items(), ("class", type(value))]
    except TypeError:  # an object in C
        return []


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the generators that a user's class holds, or its methods name."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in _OF_LIBRARIES:
            for name, value in vars(base).items():
                if _is_generator(value):
                    yield name, value
                elif isinstance(value, FunctionType):
                    yield from _of_function(value)


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function has from the functions around it, and the global variables it names that are generators."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in _names_in(function.__code__):
        value = function.__globals__.get(name)
        if _is_generator(value):
            yield name, value


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def _is_torchs(value: Any) -> bool:
    return type(value).__name__ == "Generator" and type(value).__module__.partition(".")[0] == "torch"


def _is_generator(value: Any) -> bool:
    """Return whether a value is a random generator, and no global one."""
    numpys = sys.modules.get("numpy.random")
    if isinstance(value, random.Random):
        return value is not random._inst
    if numpys is not None and isinstance(value, numpys.BitGenerator | numpys.Generator | numpys.RandomState):
        return _bits(value) is not _bits(numpys.mtrand._rand)
    if not _is_torchs(value):
        return False
    torch = sys.modules["torch"]
    return not any(value is each for each in (torch.default_generator, *torch.cuda.default_generators))


def _is_users_iterable(value: Any) -> bool:
    is_users = type(value).__module__.partition(".")[0] not in _OF_LIBRARIES and hasattr(value, "__dict__")
    return is_users and hasattr(type(value), "__iter__")


def _bits(value: Any) -> Any:
    """Return what holds the state of a generator of NumPy's."""
    return getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", value)


def _state(generator: Any) -> NDArray[np.uint8]:
    if _is_torchs(generator):
        return np.array(generator.get_state().numpy())
    if isinstance(generator, random.Random):
        state: Any = generator.getstate()
    elif hasattr(generator, "get_state"):
        state = generator.get_state(legacy=False)
    else:
        state = _bits(generator).state
    return _as_bytes(state)


def _as_bytes(state: Any) -> NDArray[np.uint8]:
    """Return JSON: PCG64's integers have 128 bits, which no array has."""
    return np.frombuffer(json.dumps(state, default=lambda array: array.tolist()).encode(), np.uint8)


def _set_state(generator: Any, array: NDArray[Any]) -> None:
    if _is_torchs(generator):
        state = generator.get_state()
        state.numpy()[...] = array
        generator.set_state(state)
        return
    state = json.loads(array.tobytes())
    if isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
    elif hasattr(generator, "get_state"):
        generator.set_state(state)
    else:
        _bits(generator).state = state


def _seed(generator: Any, seeds: np.random.SeedSequence) -> None:
    if _is_torchs(generator):
        generator.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
    elif isinstance(generator, random.Random) or hasattr(generator, "get_state"):
        generator.seed(int(seeds.generate_state(1)[0]))
    else:
        bits = _bits(generator)
        bits.state = type(bits)(seeds).state
