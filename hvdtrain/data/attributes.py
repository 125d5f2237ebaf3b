"""Save and restore what a user's sampler changes in itself: a counter of epochs, a list that it shuffles in place."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

_TAG = "~type"
_SCALARS = (bool, int, float, str, type(None))

_first: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()  # an object -> its attributes when first seen


class Attributes:
    """The plain attributes of an object: numbers, texts, arrays, and lists, tuples and dicts of these.

    A state holds those that have changed since the object was first seen. Others are as the script makes them: a run
    may resume with other settings.

    Args:
        owner: the object.
        only_scalars: leave out all but numbers and texts.
    """

    def __init__(self, owner: Any, *, only_scalars: bool) -> None:
        self._owner, self._only_scalars = owner, only_scalars
        self._before = self._encoded()
        with suppress(TypeError):  # an object without a hash, or without weak references
            self._before = _first.setdefault(owner, self._before)

    def state(self) -> dict[str, str]:
        """Return JSON by the name of an attribute that has changed."""
        return {name: text for name, text in self._encoded().items() if text != self._before.get(name)}

    def set_state(self, state: Mapping[str, str]) -> None:
        """Restore what `state` returned; other attributes become what they were when the object was first seen."""
        now, wanted = self._encoded(), self._before | dict(state)
        for name, text in wanted.items():
            if name not in now or now[name] != text:
                _assign(self._owner, name, _decoded(json.loads(text)))

    def _encoded(self) -> dict[str, str]:
        found = {}
        for name, value in vars(self._owner).items():
            if not self._only_scalars or isinstance(value, _SCALARS):
                with suppress(TypeError):
                    found[name] = json.dumps(_plain(value))
        return found


def _plain(value: Any) -> Any:
    """Return a value as JSON; TypeError if it holds other objects."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if type(value) in (list, tuple):
        items = value if set(map(type, value)) <= set(_SCALARS) else [_plain(each) for each in value]
        return list(items) if type(value) is list else {_TAG: "tuple", "items": list(items)}
    if type(value) is dict:
        return {_TAG: "dict", "items": [[_plain(key), _plain(each)] for key, each in value.items()]}
    is_tensor = type(value).__module__ == "torch" and type(value).__name__ == "Tensor"
    array = value.detach().cpu().numpy() if is_tensor else value
    if type(array) is not np.ndarray or array.dtype.kind not in "biuf":
        raise TypeError(f"no plain value. Received: {type(value).__name__}")
    data = base64.b64encode(array.tobytes()).decode()
    return {_TAG: "array", "dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return value if set(map(type, value)) <= set(_SCALARS) else [_decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value[_TAG] == "array":
        array = np.frombuffer(base64.b64decode(value["data"]), np.dtype(value["dtype"]))
        return array.reshape(value["shape"]).copy()
    items = [_decoded(each) for each in value["items"]]
    return tuple(items) if value[_TAG] == "tuple" else dict(items)


def _assign(owner: Any, name: str, value: Any) -> None:
    """Change lists and arrays in place, since other objects may hold them; replace other values."""
    now: Any = getattr(owner, name, None)
    if type(now) is list and type(value) is list:
        now[:] = value
    elif isinstance(value, np.ndarray):
        is_tensor = hasattr(now, "new_tensor")
        target = now.detach().numpy() if is_tensor else now
        if isinstance(target, np.ndarray) and target.shape == value.shape:
            target[...] = value
        elif is_tensor:
            setattr(owner, name, now.new_tensor(value))
        else:
            setattr(owner, name, value if value.ndim else value[()])
    else:
        setattr(owner, name, value)
