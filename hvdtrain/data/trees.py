"""Trees of arrays in the users' data: nested dicts, tuples and lists."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SHOWN_VALUES = 4


def as_array(leaf: Any) -> NDArray[Any]:
    """Return `leaf` as a NumPy array. NumPy has no bfloat16, which becomes float32."""
    if hasattr(leaf, "detach"):
        leaf = (leaf.float() if str(leaf.dtype) == "torch.bfloat16" else leaf).detach().cpu()
    return np.asarray(leaf)


def unpack(item: Any) -> tuple[Any, Any, Any]:
    """Split what a dataset yields into (inputs, targets, sample_weight), as Keras and torch users write it."""
    if isinstance(item, tuple | list) and 1 <= len(item) <= 3:
        return tuple(item) + (None,) * (3 - len(item))
    return item, None, None


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every leaf of nested dicts, tuples and lists; None stays None."""
    if tree is None:
        return None
    if isinstance(tree, Mapping):  # a transformers.BatchEncoding is no dict
        return {key: tree_map(function, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return rebuild(tree, [tree_map(function, value) for value in tree])
    return function(tree)


def rebuild(like: Any, values: list[Any]) -> Any:
    """Return `values` as a tuple, namedtuple or list of the type of `like`."""
    return type(like)(*values) if hasattr(like, "_fields") else type(like)(values)


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested dicts, tuples and lists, without None."""
    found: list[Any] = []
    tree_map(found.append, tree)
    return found


def num_rows(tree: Any) -> int:
    """Return the length of axis 0 of a tree of arrays or tensors; of another object its length."""
    first = next((leaf for leaf in leaves(tree) if getattr(leaf, "shape", None) or hasattr(leaf, "__len__")), None)
    if first is None:
        raise TypeError(f"A batch must tell how many samples it holds: give it a __len__. Received: {tree!r}")
    return int(first.shape[0]) if getattr(first, "shape", None) else len(first)


def take(tree: Any, rows: NDArray[np.int64]) -> Any:
    """Return the given rows of every array in the tree."""
    return tree_map(lambda array: array[rows], tree)  # np.take would first copy all of an array with strides


def part_of(value: Any, rows: slice, count: int) -> Any:
    """Return the given rows of an array or tensor with `count` of them; anything else as it is."""
    shape: Any = getattr(value, "shape", ())
    return value[rows] if len(shape) and shape[0] == count else value


def collate(samples: Sequence[Any]) -> Any:
    """Stack samples of one structure into a batch of that structure: leaves of shape (len(samples), ...)."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple | list):
        columns = [collate(column) for column in zip(*samples, strict=True)]
        return rebuild(first, columns) if hasattr(first, "_fields") else tuple(columns)
    return np.stack([as_array(sample) for sample in samples])


def is_array(leaf: Any) -> bool:
    """Return whether `leaf` is an array or a tensor with rows."""
    return bool(hasattr(leaf, "shape") and hasattr(leaf, "__array__") and len(leaf.shape))


def are_arrays(tree: Any) -> bool:
    """Return whether the tree has leaves, and all are arrays or tensors with rows."""
    found = leaves(tree)
    return bool(found) and all(map(is_array, found))


def crc32(array: NDArray[Any]) -> int:
    """Return the CRC-32 of an array's content."""
    # The bytes of an array of texts would be addresses, which differ between ranks.
    content = repr(array.tolist()).encode() if array.dtype == object else np.asarray(array, order="C").tobytes()
    return zlib.crc32(content)


def first_values(sample: NDArray[Any]) -> str:
    """Return a sample's first values."""
    values = np.ravel(sample)
    text = np.array2string(values[:_SHOWN_VALUES], precision=4, separator=", ")
    return text if len(values) <= _SHOWN_VALUES else f"{text[:-1]}, ...]"


def check_objects(array: NDArray[Any], rank: int) -> None:
    """Raise TypeError if an array holds Python objects, unless these are texts, of which a model may take some."""
    if array.dtype != object:
        return
    values = np.ravel(array)
    first = values[0] if len(values) else ""
    if isinstance(first, str | bytes):
        return
    kind = type(first).__name__
    if isinstance(first, Number):
        advice = 'Convert it: array.astype("float32")'
    else:
        shapes = ", ".join(dict.fromkeys(str(np.shape(value)) for value in values[:_SHOWN_VALUES] if is_array(value)))
        kind += f" of shapes {shapes}" if shapes else ""
        advice = (
            "Samples of one shape make an array: np.stack(list(array)). Others do not. Pad them in the dataset, or "
            "pass a torch DataLoader whose collate_fn pads"
        )
    raise TypeError(f"An array must hold numbers. Received: dtype object, of {kind}, on rank {rank}. {advice}")
