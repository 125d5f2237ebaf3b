"""Compare data over ranks: a few samples, and the indices of subsets.

Each rank reads the same few samples, with global random generators seeded alike, and ranks compare digests. Only where
digests differ, ranks exchange more and read these samples several times: what changes between two readings is random,
and is not compared. Floating values and color images that are close give a warning and no error, because another CPU or
another version of a decoder may round them in another way.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from numbers import Number
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.generators import Generators, reached
from hvdtrain.data.trees import as_array
from hvdtrain.distributed import checksums, rank_state
from hvdtrain.distributed.world import World
from hvdtrain.errors import DesyncError

log = logging.getLogger("hvdtrain")

SAMPLES = 5  # of a dataset that are read
_LONGEST_S = 2.0  # no further sample is read after it
_READINGS = 8  # of a sample that differs: a coin that falls alike on each of two ranks is taken for data once in 2^15
_CLOSE = 0.02  # of the largest value
_PARTS = 64  # of an array, whose means are compared
_SHOWN = 4  # values, or indices
_SHOWN_TEXT = 60  # characters
_ERROR = "error"  # the place of the error that reading a sample raised
_WHOLE_BYTES, _ROWS = 1 << 26, 1024  # of a column that is compared whole; rows of a larger one


class Leaf(NamedTuple):
    """A part of a sample.

    Attributes:
        kind: dtype and shape, or type.
        digest: of the content; empty for a type whose content is not compared.
        shown: the first values.
        means: of up to 64 equal parts of floating values or of a color image; None if all bits must be equal.
    """

    kind: str
    digest: str = ""
    shown: str = ""
    means: list[float] | None = None


Leaves = dict[str, Leaf]  # a sample's, by their place in it, such as "[0]"
# Yields the leaves of each of these samples, or the exception that reading it raised. Seeds the data's generators.
Read = Callable[[Sequence[int], Generators], Iterator[Leaves | Exception]]


@dataclasses.dataclass(frozen=True)
class Contents:
    """The parts of data, read by index, that ranks compare.

    Attributes:
        data: whose samples are read once, and not again for as long as it is there.
        length: number of samples.
        read: reads samples, with generators seeded alike on all ranks.
        exact: returns texts by name that must be equal on all ranks.
        most: number of samples to read.
        unit: "sample", or what else has an index.
    """

    data: Any
    length: int
    read: Read
    exact: Callable[[], dict[str, str]] = dict
    most: int = SAMPLES
    unit: str = "sample"


_read_before: WeakKeyDictionary[Any, dict[int, Leaves]] = WeakKeyDictionary()


def compare(contents: Contents | None, generators: Generators, *, world: World, what: str, advice: str) -> None:
    """Raise DesyncError on all ranks if samples of the data `what` differ between ranks; a collective."""
    if world.size == 1:
        return
    mine = _read_few(contents, generators)
    digests = {str(index): _digest(_leaves(found)) for index, found in mine.items()}
    gathered = world.allgather_object(digests, name="contents")
    common = [index for index in gathered[0] if all(index in each for each in gathered)]
    differing = [int(index) for index in common if any(each[index] != gathered[0][index] for each in gathered)]
    if not differing or contents is None:
        return
    of_ranks = _exchange({index: _leaves(mine[index]) for index in differing}, world)
    suspects = _differences(of_ranks)
    readings = 2 if all(_is_close(each, of_ranks) for each in suspects) else _READINGS
    of_ranks, read = _read_again(contents, generators, suspects, readings, world)
    left = [part for part in _differences(of_ranks) if part in suspects]
    for part in sorted(left, key=lambda each: _is_close(each, of_ranks))[:1]:
        difference = _describe(part, of_ranks, contents.unit)
        if not _is_close(part, of_ranks):
            error = read[part[0]]
            cause = error if isinstance(error, Exception) else None
            raise DesyncError(f"Ranks disagree on the {what}: {difference}. {advice}") from cause
        if world.is_root:
            log.warning("Ranks disagree a little on the %s: %s. Training continues.", what, difference)


def _read_few(contents: Contents | None, generators: Generators) -> dict[int, Leaves | Exception]:
    """Return the first, the last and a few other samples, as many as can be read in about two seconds."""
    if contents is None:
        return {}
    try:
        before = _read_before.get(contents.data)
    except TypeError:  # it has no hash, or no weak reference
        before = None
    if before is not None:
        return dict(before)
    last, begin = contents.length - 1, time.monotonic()
    between = [last * (2 * part + 1) // (2 * contents.most - 4) for part in range(contents.most - 2)]
    indices = list(dict.fromkeys([0, last, *between]))
    found: dict[int, Leaves | Exception] = {}
    for index, sample in zip(indices, contents.read(indices, generators), strict=False):
        found[index] = sample
        if time.monotonic() - begin > _LONGEST_S:
            break
    leaves = {index: sample for index, sample in found.items() if not isinstance(sample, Exception)}
    if len(leaves) == len(found):
        try:
            _read_before[contents.data] = leaves
        except TypeError:
            pass
    return found


Part = tuple[int, str]  # a sample's index, and the place in it
Parts = dict[Part, Leaf]


def _exchange(samples: Mapping[int, Leaves], world: World) -> list[Parts]:
    """Return the leaves of these samples on each rank."""
    mine = [[index, place, *leaf] for index, leaves in samples.items() for place, leaf in leaves.items()]
    everyones = world.allgather_object(mine, name="contents.leaves")
    return [{(int(index), place): Leaf(*leaf) for index, place, *leaf in rows} for rows in everyones]


def _differences(of_ranks: Sequence[Parts]) -> list[Part]:
    """Return the parts that are not equal on all ranks, errors first."""
    parts = dict.fromkeys(part for held in of_ranks for part in held)
    found = [part for part in parts if len({_bits(held.get(part)) for held in of_ranks}) > 1]
    return sorted(found, key=lambda part: part[1] != _ERROR)


def _bits(leaf: Leaf | None) -> tuple[str, str] | None:
    return leaf and (leaf.kind, leaf.digest)


def _is_close(part: Part, of_ranks: Sequence[Parts]) -> bool:
    """Return whether a part's means are nearly equal on all ranks."""
    held = [each.get(part) for each in of_ranks]
    first = held[0]
    if first is None or any(leaf is None or leaf.means is None or leaf.kind != first.kind for leaf in held):
        return False
    means = np.array([leaf.means for leaf in held if leaf is not None], np.float64)
    scale = np.abs(means[np.isfinite(means)]).max(initial=0.0)
    return all(np.allclose(row, means[0], rtol=0.0, atol=_CLOSE * scale, equal_nan=True) for row in means)


def _read_again(
    contents: Contents, generators: Generators, suspects: Sequence[Part], readings: int, world: World
) -> tuple[list[Parts], dict[int, Leaves | Exception]]:
    """Read the samples of `suspects` several times, in one pass: each pass may begin in a new worker process.

    Returns:
        What each rank has read first, without those suspects that another reading has changed on any rank; and this
        rank's samples.
    """
    indices = sorted({index for index, _ in suspects})
    read: dict[int, Leaves | Exception] = {}
    changed: set[Part] = set()
    for index, sample in zip(indices * readings, contents.read(indices * readings, generators), strict=False):
        first, again = _leaves(read.setdefault(index, sample)), _leaves(sample)
        changed |= {
            (i, place) for i, place in suspects if i == index and _bits(first.get(place)) != _bits(again.get(place))
        }
        if len(changed) == len(suspects):
            break
    gathered = world.allgather_object(sorted(changed), name="contents.random")
    is_random = {(int(index), place) for each in gathered for index, place in each}
    of_ranks = _exchange({index: _leaves(sample) for index, sample in read.items()}, world)
    return [{part: leaf for part, leaf in each.items() if part not in is_random} for each in of_ranks], read


def _describe(part: Part, of_ranks: Sequence[Parts], unit: str) -> str:
    index, place = part
    held = [each.get(part) for each in of_ranks]
    others = [rank for rank, leaf in enumerate(held) if _bits(leaf) != _bits(held[0])]
    differ = f"({len(others)} of {len(of_ranks)} ranks differ)"
    if place == _ERROR:
        rank, error = next((rank, leaf) for rank, leaf in enumerate(held) if leaf is not None)
        return f"{unit} {index} cannot be read on rank {rank}: {error.shown} {differ}"
    first, other = (f"{leaf.shown} ({leaf.kind})" if leaf else "missing" for leaf in (held[0], held[others[0]]))
    name = f"{place} of {unit} {index}" if place else f"{unit} {index}"
    return f"{name} is {first} on rank 0 but {other} on rank {others[0]} {differ}"


def leaves_of(sample: Any, place: str = "") -> Leaves:
    """Return the leaves of nested dicts, dataclasses, tuples and lists. A list of numbers or texts is a leaf."""
    if isinstance(sample, Mapping):
        parts = [(f"{place}[{key!r}]", value) for key, value in sample.items()]
    elif dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        parts = [(f"{place}.{each.name}", getattr(sample, each.name)) for each in dataclasses.fields(sample)]
    elif isinstance(sample, tuple | list) and not all(isinstance(each, Number | str | bytes) for each in sample):
        parts = [(f"{place}[{number}]", value) for number, value in enumerate(sample)]
    else:
        return {place: _leaf(sample)}
    return {name: leaf for part, value in parts for name, leaf in leaves_of(value, part).items()}


def _leaf(value: Any) -> Leaf:
    kind = type(value).__name__
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str | bytes):
        # Each host may have the file in a folder of its own.
        text = value.rpartition("/")[2] if isinstance(value, str) and value.startswith("/") else value
        return Leaf(kind, checksums.of_json(repr(text)).hex(), repr(value[:_SHOWN_TEXT]))
    try:
        array = as_array(value)
    except Exception:  # noqa: BLE001 - a sparse tensor, say: its type is all that is compared
        return Leaf(kind)
    if array.dtype.kind in "OV" and not all(isinstance(each, str | bytes) for each in array.flat):
        return Leaf(kind)
    first = [f"{each:.4g}" if isinstance(each, float) else repr(each) for each in array.reshape(-1)[:_SHOWN].tolist()]
    shown = f"[{', '.join(first)}{', ...' if array.size > _SHOWN else ''}]" if array.ndim else first[0]
    kind = f"{array.dtype} {array.shape}" if array.ndim else str(array.dtype)
    return Leaf(kind, _digest_of(array), shown, _means(array))


def _digest_of(array: NDArray[Any]) -> str:
    # The bytes of an array of objects are addresses.
    is_objects = array.dtype == object
    return (checksums.of_json(repr(array.tolist())) if is_objects else checksums.of_array(array)).hex()


def _means(array: NDArray[Any]) -> list[float] | None:
    """Return means of equal parts, for what decoders and processors round in different ways."""
    is_color_image = array.dtype == np.uint8 and array.ndim >= 3
    if not array.size or not (array.dtype.kind in "fc" or is_color_image):
        return None
    flat = np.asarray(array, order="C").reshape(-1)
    flat = flat.view(flat.real.dtype)
    edges = np.linspace(0, flat.size, min(_PARTS, flat.size), endpoint=False).astype(np.int64)
    with np.errstate(all="ignore"):
        sums = np.add.reduceat(flat, edges, dtype=np.float64)
        return [float(each) for each in sums / np.diff(edges, append=flat.size)]


def _leaves(read: Leaves | Exception) -> Leaves:
    if not isinstance(read, Exception):
        return read
    kind = type(read).__name__
    text = str(read).strip().rpartition("\n")[2]  # of an error in a worker process, the end of its traceback
    return {_ERROR: Leaf(kind, "", text if text.startswith(kind) else f"{kind}: {text}")}


def _digest(leaves: Leaves) -> str:
    return checksums.of_json({place: [leaf.kind, leaf.digest] for place, leaf in leaves.items()}).hex()


def read_here(
    get: Callable[[int], Leaves], indices: Sequence[int], generators: Generators
) -> Iterator[Leaves | Exception]:
    """Yield what `get` returns for each index, or the exception that it raised; no random state changes."""
    for index in indices:
        found: Leaves | Exception
        with _global_generators_seeded(index), generators.aside():
            generators.seed((index,))
            try:
                found = get(index)
            except Exception as error:  # noqa: BLE001 - ranks compare it: whatever it is, they must not wait
                found = error
        yield found


@contextmanager
def _global_generators_seeded(seed: int) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's global generators, and restore their states when the block ends."""
    torch: Any = sys.modules.get("torch")
    with rank_state.random_states_restored(), torch.random.fork_rng(_gpus(torch)) if torch else nullcontext():
        random.seed(seed)
        if "numpy.random" in sys.modules:
            np.random.seed(seed % 2**32)  # noqa: NPY002 - what users and their libraries draw from
        if torch:
            torch.default_generator.manual_seed(seed)
            for _ in _gpus(torch):
                torch.cuda.manual_seed(seed)
        yield


def _gpus(torch: Any) -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []


def subsets(data: Any) -> dict[str, str]:
    """Return the indices of all subsets that a dataset reads from, as texts by name.

    A subset is torch's `Subset`, or what has its attributes `dataset` and `indices`. It is found behind other datasets'
    attributes too.
    """
    datasets = reached({"dataset": data}, through=lambda value: hasattr(type(value), "__getitem__"))
    held = ((path, getattr(value, "__dict__", {})) for path, value in datasets)
    return {f"{path}.indices": _indices(own["indices"]) for path, own in held if {"dataset", "indices"} <= own.keys()}


def exact_columns(columns: Any) -> dict[str, str]:
    """Return texts of those arrays of a tree that hold integers or texts, such as labels: equal bits on all hosts."""
    found = leaves_of(columns)
    exact = {place: leaf for place, leaf in found.items() if leaf.digest and leaf.means is None}
    return {f"data{place}": f"{leaf.shown} ({leaf.kind}, digest {leaf.digest[:8]})" for place, leaf in exact.items()}


def some_rows(column: NDArray[Any]) -> NDArray[Any]:
    """Return the column, or at most 1,024 rows of a large one."""
    is_large = column.nbytes > _WHOLE_BYTES or column.dtype == object
    return column[:: -(-len(column) // _ROWS)] if is_large and len(column) > _ROWS else column


def _indices(indices: Any) -> str:
    """Return the number of indices, the first ones, and a digest."""
    array = as_array(indices)
    digest = _digest_of(array.astype(np.int64) if array.dtype.kind in "iu" else array)
    first = ", ".join(map(str, array.reshape(-1)[:_SHOWN].tolist()))
    return f"[{first}{', ...' if array.size > _SHOWN else ''}] ({array.size}, digest {digest[:8]})"
