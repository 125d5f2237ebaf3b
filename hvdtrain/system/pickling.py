"""Pickle functions and classes of a user's script, with the names of the files they come from."""

from __future__ import annotations

import io
import types
from collections import ChainMap
from collections.abc import Callable
from typing import Any

import cloudpickle


def dumps(obj: Any) -> bytes:
    """Return `obj` pickled as cloudpickle does it; `pickle.loads` reads it where hvdtrain is installed.

    Raises:
        Exception: what an object's own methods raise, where it cannot be pickled.
    """
    file = io.BytesIO()
    _Pickler(file).dump(obj)
    return file.getvalue()


def _make_code(filename: str, make: Callable[..., types.CodeType], args: tuple[Any, ...]) -> types.CodeType:
    return make(*args).replace(co_filename=filename)


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, args = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _make_code, (code.co_filename, make, args)


class _Pickler(cloudpickle.Pickler):
    # cloudpickle from 3.1.3 on names the file of each function "<dynamic-code>": a traceback would show no lines.
    dispatch_table = ChainMap({types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)
