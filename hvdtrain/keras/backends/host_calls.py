"""Calls of Python functions within JAX's steps; on CPUs, on the memory of the step's own arrays.

`jax.experimental.io_callback` copies each argument and each result: for 9M gradients this was a fifth of a step. On
CPUs, XLA's foreign function interface gives a function the addresses instead. Its C structures are those of
xla/ffi/api/c_api.h, which comes with jaxlib: the fields here have not moved within major version 0.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import math
import re
import secrets
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import io_callback
from numpy.typing import NDArray

from hvdtrain.errors import HvdTrainError

log = logging.getLogger("hvdtrain")

Tensor = Any
Array = NDArray[Any]
# Takes arguments, which it must not change, and results, which it fills; each is an array of one dimension.
Function = Callable[[list[Array], list[Array]], None]

_TARGET = "hvdtrain_host_call"
_METADATA, _INTERNAL = 1, 13  # XLA_FFI_Extension_Metadata, XLA_FFI_Error_Code_INTERNAL
_DTYPES = {
    10: np.dtype(np.float16),
    11: np.dtype(np.float32),
    12: np.dtype(np.float64),
    16: np.dtype(ml_dtypes.bfloat16),
}

# By number, for the life of the process: XLA does not say when a compiled step is gone. The numbers differ from those
# of other processes, so that a step from JAX's cache on disk never calls another function.
_functions: dict[int, Function] = {}
_numbers = itertools.count(secrets.randbits(62))


def call(
    function: Function,
    shapes: Sequence[Any],
    arguments: Sequence[Tensor],
    *,
    in_place: bool = False,
    rooms: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Call `function(arguments, results)` in each run of a step that is traced, and return the results.

    Calls keep their order among each other and among ordered callbacks.

    Args:
        function: holds no traced value: JAX may run it long after this trace is gone. What it raises fails the step.
        shapes: of the results, with dtypes.
        arguments: traced tensors.
        in_place: True: each result has the value of its argument when the function is called.
        rooms: a tensor for each result, or none, whose memory the results may take; the function does not get them.
    """
    if not _is_possible([*arguments, *rooms, *shapes]):
        copying = functools.partial(_with_copies, function, shapes, in_place)
        copied: list[Tensor] = io_callback(copying, list(shapes), *arguments, ordered=True)
        return copied
    taken = range(len(arguments)) if in_place else range(len(arguments), len(arguments) + len(rooms))
    aliases = {argument: result for result, argument in enumerate(taken)}
    mark = jax.ShapeDtypeStruct((), jnp.float32)
    # XLA runs foreign functions in any order that their arguments allow, and ranks must not differ.
    begun = io_callback(_zero, mark, ordered=True)
    marked = functools.partial(_without_copies, function, len(arguments), in_place)
    found = _foreign(marked, [*shapes, mark], [*arguments, *rooms, begun], aliases)
    io_callback(_nothing, None, found[-1], ordered=True)
    return list(found[:-1])


def fill(array: Array, values: Array) -> None:
    """Copy values into an array, unless they are in its memory."""
    if array.ctypes.data != values.ctypes.data:
        array[:] = values


def _foreign(
    function: Function, shapes: Sequence[Any], arguments: Sequence[Tensor], aliases: dict[int, int]
) -> Sequence[Tensor]:
    """Let XLA call a function on the memory of arguments and results; `aliases` names results in arguments' memory."""
    number = next(_numbers)
    _functions[number] = function
    called = jax.ffi.ffi_call(_TARGET, shapes, has_side_effect=True, input_output_aliases=aliases)
    found: Sequence[Tensor] = called(*arguments, number=np.int64(number))
    return found


def _zero() -> Array:
    return np.zeros((), np.float32)


def _nothing(_: Any) -> None:
    pass


def _with_copies(function: Function, shapes: Sequence[Any], in_place: bool, *arguments: Any) -> list[Array]:
    arrays, results = [np.asarray(each).reshape(-1) for each in arguments], [np.empty(s.shape, s.dtype) for s in shapes]
    _run(function, in_place, arrays, [result.reshape(-1) for result in results])
    return results


def _without_copies(
    function: Function, count: int, in_place: bool, arguments: list[Array], results: list[Array]
) -> None:
    """Run a function on the first `count` arguments; the others are rooms, and the marks that keep the order."""
    *results, done = results
    _run(function, in_place, arguments[:count], results)
    done[:] = 0


def _run(function: Function, in_place: bool, arguments: list[Array], results: list[Array]) -> None:
    if in_place:
        for argument, result in zip(arguments, results, strict=True):
            fill(result, argument)
    function(arguments, results)


def _is_possible(arrays: Sequence[Any]) -> bool:
    """Say whether XLA can call on the memory of these: in a compiled step of one CPU device."""
    is_traced = any(isinstance(array, jax.core.Tracer) for array in arrays)
    is_one_cpu = jax.default_backend() == "cpu" and jax.local_device_count() == 1
    return is_traced and is_one_cpu and all(array.dtype in _DTYPES.values() for array in arrays) and _works()


@functools.cache
def _works() -> bool:
    """Let XLA call the handler once; if it does not do what is meant, steps copy."""
    try:
        _check_version()
        jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_handler), platform="cpu")
        with jax.ensure_compile_time_eval():
            found = jax.jit(_halves)(np.arange(3, dtype=np.float32))
        works = np.array_equal(found, [0, 0.5, 1])
        reason = f"it returned {found}"
    except Exception as error:  # noqa: BLE001 - another jaxlib
        works, reason = False, f"{type(error).__name__}: {error}"
    if not works:
        log.info("JAX %s: steps copy gradients from XLA's memory and back (%s)", jax.__version__, reason)
    return works


def _check_version() -> None:
    """Raise unless fields are where they are here. A handler that XLA refuses later leaves JAX without its CPUs."""
    major, minor = _version()
    if major != 0 or minor < 1:
        raise HvdTrainError(f"XLA's foreign function interface must be 0.1 or newer. Received: {major}.{minor}")


@functools.cache
def _version() -> tuple[int, int]:
    """Return the version of the interface that this jaxlib has, from its header: older ones do not say it in calls."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR"))
    return int(major[1]), int(minor[1])  # type: ignore[index] # TypeError: not found


def _halves(array: Tensor) -> Tensor:
    def halve(arguments: list[Array], results: list[Array]) -> None:
        np.divide(arguments[0], 2, out=results[0])

    (halved,) = _foreign(halve, [jax.ShapeDtypeStruct((3,), jnp.float32)], [array + 0], {0: 0})
    return halved


_HEAD = (("size", ctypes.c_size_t), ("extension", ctypes.c_void_p))


class _Version(ctypes.Structure):
    _fields_ = (*_HEAD, ("major", ctypes.c_int), ("minor", ctypes.c_int))


class _Api(ctypes.Structure):
    _fields_ = (*_HEAD, ("version", _Version), ("internal", ctypes.c_void_p), ("create_error", ctypes.c_void_p))


class _Metadata(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32))


class _Extension(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    )  # fmt: skip


class _Buffer(ctypes.Structure):
    _fields_ = (
        *_HEAD, ("dtype", ctypes.c_int), ("data", ctypes.c_void_p), ("rank", ctypes.c_int64),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    )  # fmt: skip


class _Buffers(ctypes.Structure):
    _fields_ = (
        *_HEAD, ("count", ctypes.c_int64), ("types", ctypes.c_void_p),
        ("items", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )  # fmt: skip


class _Scalar(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int), ("value", ctypes.POINTER(ctypes.c_int64)))


class _Attributes(ctypes.Structure):
    _fields_ = (
        *_HEAD, ("count", ctypes.c_int64), ("types", ctypes.c_void_p), ("names", ctypes.c_void_p),
        ("items", ctypes.POINTER(ctypes.POINTER(_Scalar))),
    )  # fmt: skip


class _Frame(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t), ("extension", ctypes.POINTER(_Extension)), ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p), ("stage", ctypes.c_int), ("arguments", _Buffers), ("results", _Buffers),
        ("attributes", _Attributes),
    )  # fmt: skip


class _Error(ctypes.Structure):
    _fields_ = (*_HEAD, ("message", ctypes.c_char_p), ("code", ctypes.c_int))


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def _handler(address: int) -> Any:
    """Call the function that XLA names; the result is its error, or None."""
    frame = _Frame.from_address(address)
    if frame.extension and frame.extension.contents.type == _METADATA:
        metadata = frame.extension.contents.metadata.contents
        (metadata.version.major, metadata.version.minor), metadata.traits = _version(), 0
        return None
    try:
        function = _functions[frame.attributes.items[0].contents.value[0]]
        function(_arrays(frame.arguments, is_result=False), _arrays(frame.results, is_result=True))
    except BaseException:  # noqa: BLE001 - XLA raises it where the step was called
        create = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Error))(frame.api.contents.create_error)
        error = _Error(size=ctypes.sizeof(_Error), message=traceback.format_exc().encode(), code=_INTERNAL)
        return create(ctypes.byref(error))
    return None


def _arrays(buffers: Any, *, is_result: bool) -> list[Array]:
    return [_array(buffers.items[i].contents, is_result=is_result) for i in range(buffers.count)]


def _array(buffer: Any, *, is_result: bool) -> Array:
    """Return a flat array of a buffer's memory."""
    dtype, numel = _DTYPES[buffer.dtype], math.prod(buffer.shape[i] for i in range(buffer.rank))
    if not numel:
        return np.empty(0, dtype)
    return np.asarray(_Memory(buffer.data, numel * dtype.itemsize, is_result)).view(dtype)


class _Memory:
    """Memory that somebody else holds."""

    def __init__(self, address: int, num_bytes: int, is_writeable: bool) -> None:
        self.__array_interface__ = {
            "data": (address, not is_writeable), "shape": (num_bytes,), "typestr": "|u1", "version": 3,
        }  # fmt: skip
