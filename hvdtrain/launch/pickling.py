"""Pickle what goes from one process to another, and name the part that cannot be."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import cloudpickle

_DEPTH = 6


def pack(parts: dict[str, Any], *, where: str) -> bytes:
    """Return the values of `parts` as one tuple, pickled.

    Args:
        parts: name -> object. What two of them have in common stays in common.
        where: for the error: "be sent to the ranks".

    Raises:
        TypeError: something cannot be pickled; the message names it.
    """
    try:
        return cloudpickle.dumps(tuple(parts.values()))  # type: ignore[no-any-return]
    except Exception as problem:  # noqa: BLE001, an object's own methods may raise anything
        name, value = next(_culprits(parts.items()), ("it", parts))
        kind = type(value)
        raise TypeError(f"{name}, a {kind.__module__}.{kind.__qualname__}, cannot {where}: {problem}") from None


def _culprits(named: Any, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield the innermost objects that cannot be pickled, with what they are called."""
    for name, value in named:
        if not _is_picklable(value):
            yield from _culprits(_inside(name, value), depth - 1) if depth else ()
            yield name, value


def _is_picklable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001, an object's own methods may raise anything
        return False
    return True


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{i}]", item) for i, item in enumerate(value))
    elif inspect.isfunction(value):
        found = inspect.getclosurevars(value)
        for variable, item in {**found.globals, **found.nonlocals}.items():
            yield f"{variable}, which {name} uses", item
    elif inspect.ismethod(value):
        yield f"{name}.__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((f"{name}.{part}", getattr(value, part)) for part in ("func", "args", "keywords"))
    elif hasattr(value, "__dict__") and not inspect.ismodule(value) and not inspect.isclass(value):
        yield from ((f"{name}.{attribute}", item) for attribute, item in vars(value).items())
