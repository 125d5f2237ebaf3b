"""A file of named arrays in the format of safetensors, which is written and read array by array."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import CheckpointError
from hvdtrain.system import large_arrays, private_files, safe_arrays

# The order in which safetensors writes them, from the last to the first. NumPy lacks its other types, such as bfloat16.
_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "int32": "I32",
    "uint32": "U32", "float32": "F32", "complex64": "C64", "float64": "F64", "int64": "I64", "uint64": "U64",
}  # fmt: skip
_ORDER = {name: place for place, name in enumerate(_CODES)}
_TYPES = {code: name for name, code in _CODES.items()}
_COMMENT = "__metadata__"  # a key of the header that is no array
_PIECE_BYTES = 1 << 20
_AT_ONCE_BYTES = 1 << 30  # Linux reads at most 2 GiB in one call


class Kind(NamedTuple):
    """The shape and type of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Size of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class FileEntry(NamedTuple):
    """One file of a checkpoint."""

    size: int
    sha256: str


def sha256_of(file: IO[bytes]) -> str:
    """Return the hash of a file's content, read piece by piece."""
    digest = hashlib.sha256()
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


def kind_of(array: NDArray[Any]) -> Kind:
    """Return the shape and type of an array."""
    return Kind(array.shape, array.dtype)


def check_kinds(stem: str, kinds: Mapping[str, Kind]) -> None:
    """Raise CheckpointError if a file cannot hold one of these arrays."""
    for name, kind in kinds.items():
        if kind.dtype.name not in _CODES and kind.dtype != np.complex128:
            raise CheckpointError(f"Array {name!r} of {stem} has dtype {kind.dtype}, which no checkpoint can hold.")
    if _COMMENT in kinds:
        raise CheckpointError(f"Array {_COMMENT!r} of {stem} has a name that safetensors reserves.")


class ArrayFile:
    """A file that is being written.

    Args:
        path: of a new file.
        kinds: of all arrays that it will hold.
    """

    def __init__(self, path: Path, kinds: Mapping[str, Kind]) -> None:
        plain = [safe_arrays.encoded_kind(name, *kind) for name, kind in kinds.items()]
        header, offset = dict[str, Any](), 0
        self._path, self._missing = path, dict[str, int]()  # where arrays begin that are not written yet
        for name, shape, dtype in sorted(plain, key=lambda kind: (-_ORDER[kind[2].name], kind[0])):
            end = offset + Kind(shape, dtype).nbytes
            header[name] = {"dtype": _CODES[dtype.name], "shape": shape, "data_offsets": [offset, end]}
            self._missing[name], offset = offset, end
        content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        content += b" " * (-len(content) % 8)
        with private_files.open_file(path, "wb") as file:
            file.write(len(content).to_bytes(8, "little") + content)
            self._begin = file.tell()

    def put(self, name: str, array: NDArray[Any]) -> None:
        """Write one array, in its place."""
        ((stored, plain),) = safe_arrays.encoded({name: array}).items()
        little = plain.astype(plain.dtype.newbyteorder("<"), copy=False)
        with self._path.open("r+b") as file:
            file.seek(self._begin + self._missing[stored])
            file.write(little.reshape(-1).view(np.uint8).data)
        del self._missing[stored]

    def finish(self) -> FileEntry:
        """Return the file's size and hash, once the disk has it."""
        if self._missing:
            raise ValueError(f"{self._path.name} lacks arrays, such as {next(iter(self._missing))}")
        with self._path.open("rb") as file:
            digest = sha256_of(file)
            os.fsync(file.fileno())
            return FileEntry(file.tell(), digest)


class OpenFile:
    """A file that is read; the same one also after another has taken its name. It is closed once nobody uses it.

    Args:
        descriptor: of the open file; the object opens it for itself.
        name: of the file, for messages.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        self.name, self._descriptor = name, os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, array: NDArray[np.uint8], offset: int) -> None:
        """Fill an array with what begins at `offset`; CheckpointError if it cannot be read."""
        done = 0
        try:
            while done < len(array):
                count = os.preadv(self._descriptor, [array[done : done + _AT_ONCE_BYTES].data], offset + done)
                if not count:
                    raise CheckpointError(f"{self.name} was cut off while it was read")
                done += count
        except OSError as error:
            raise CheckpointError(f"{self.name} cannot be read ({error.strerror})") from error


class StoredArray(NamedTuple):
    """An array in a file: `read` returns it."""

    kind: Kind
    file: OpenFile
    name: str  # in the file
    plain: Kind  # as it is there
    offset: int

    def read(self) -> NDArray[Any]:
        """Return the array, in memory of its own."""
        array = large_arrays.empty(self.plain.shape, self.plain.dtype.newbyteorder("<"))
        self.file.read(array.reshape(-1).view(np.uint8), self.offset)
        (decoded,) = safe_arrays.decoded({self.name: array.astype(self.plain.dtype, copy=False)}).values()
        return decoded

    def read_piece(self, first: int, last: int) -> NDArray[Any]:
        """Return the numbers `first` to `last` of the array in one dimension, in memory of their own."""
        dtype = self.kind.dtype
        piece = np.empty(last - first, dtype.newbyteorder("<"))
        self.file.read(piece.view(np.uint8), self.offset + first * dtype.itemsize)
        return piece.astype(dtype, copy=False)


class StoredArrays(Mapping[str, NDArray[Any]]):
    """The arrays of a file, by name: one is read when it is asked for, and not kept.

    Attributes:
        stored: the arrays, which are not read.
    """

    def __init__(self, stored: Mapping[str, StoredArray]) -> None:
        self.stored = dict(stored)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.stored[name].read()

    def __contains__(self, name: object) -> bool:
        return name in self.stored  # Mapping's would read it

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def find_arrays(file: OpenFile, size: int) -> StoredArrays:
    """Return the arrays of a file of this size; CheckpointError if it is none of safetensors that NumPy can hold."""
    try:
        length = np.zeros(8, np.uint8)
        file.read(length, 0)
        begin = 8 + int.from_bytes(length.tobytes(), "little")
        if begin > size:
            raise ValueError(f"its header has {begin - 8} bytes, and the file {size}")
        content = np.zeros(begin - 8, np.uint8)
        file.read(content, 8)
        found = {}
        for name, entry in json.loads(content.tobytes()).items():
            if name != _COMMENT:
                plain = Kind(tuple(map(operator.index, entry["shape"])), np.dtype(_TYPES[entry["dtype"]]))
                first, end = entry["data_offsets"]
                if not 0 <= first <= end <= size - begin or end - first != plain.nbytes:
                    raise ValueError(f"array {name!r} is {entry}")
                known, shape, dtype = safe_arrays.decoded_kind(name, *plain)
                found[known] = StoredArray(Kind(shape, dtype), file, name, plain, begin + first)
    except (CheckpointError, AttributeError, KeyError, ValueError, TypeError, RecursionError) as error:
        # Its hash is right, so it was written like this.
        raise CheckpointError(f"{file.name} is no safetensors file that numpy can hold: {error!r}") from error
    return StoredArrays(found)
