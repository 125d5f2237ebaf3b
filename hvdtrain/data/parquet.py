"""Parquet files as arrays that any sample can be taken from, which no process holds in memory.

Parquet is compressed by row groups: to read one row is to unpack thousands, and a shuffled epoch asks for rows in any
order. So the first process of a host that reads a table unpacks it once, a batch at a time, into plain arrays on local
disk; all processes of the host map those, and share what the system keeps of them. The Trainer then has arrays like any
others: the same order, the same sharing out, the same numbers.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hvdtrain.errors import HvdTrainError, PackageMissingError

Columns = Sequence[str] | Mapping[str, str | Sequence[str]]

_BATCH_ROWS = 2**14
_LAYOUT = 1  # of what is unpacked: another one is another folder
_UNUSED_S = 7 * 24 * 3600.0
_WAIT_S = 3600.0
_POLL_S = 0.1
_SPARKS = re.compile(r"part-\d{5}-[0-9a-f]{8}-")
_NUMBERS = ("bool", "int", "uint", "halffloat", "float", "double")


def read_parquet(
    path: str | os.PathLike[str],
    columns: Columns | None = None,
    *,
    dtypes: Mapping[str, DTypeLike] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> dict[str, NDArray[Any]]:
    """Return columns of a Parquet file, or of a folder of them, as arrays: one row a sample, types kept.

    A column of numbers has the shape (rows,), one of lists of one length (rows, length). Rows have the order of the
    files' names, and within a file its own, on every rank. They lie in memory-mapped files: rows are read when they are
    asked for, in any order. Every rank must see the Parquet files.

    Args:
        path: a file, a folder, or a URL such as s3://bucket/folder.
        columns: names; or {name of an array: a column, or several, side by side in one array of shape (rows, width)}.
            None for all columns.
        dtypes: {name of an array: its type}, such as float32 for the doubles of a table; others keep theirs.
        cache_dir: where arrays are unpacked, on a disk of this host with room for them; by default in the folder for
            temporary files. What nobody has read for a week is removed.

    Raises:
        PackageMissingError: pyarrow is not installed.
        FileNotFoundError: there is no such file or folder here, or nothing in it.
        ValueError: a folder half written, a missing column, a column that is not of numbers, a null, lists of several
            lengths, or no rows.
        HvdTrainError: the files cannot be unpacked here.
    """
    try:
        modules = _Modules()
    except ImportError:
        raise PackageMissingError("pyarrow is not installed. Run: pip install 'hvdtrain[parquet]'") from None
    table = _Table.find(os.fspath(path), modules)
    casts = {name: np.dtype(each) for name, each in (dtypes or {}).items()}
    wanted = table.choose(columns, casts)
    written = {name: dtype.str for name, dtype in casts.items()}
    key = hashlib.sha256(json.dumps([_LAYOUT, table.identity, wanted, written]).encode()).hexdigest()[:32]
    parent = _cache(cache_dir)
    folder = parent / key
    if not folder.is_dir():
        with _lock(parent / f"{key}.lock"):
            if not folder.is_dir():  # another process may have been first
                _forget_unused(parent)
                _unpack(table, wanted, casts, folder)
    os.utime(folder)
    # A copy of a page that is written to: nobody else's data changes.
    return {name: np.asarray(np.load(folder / f"{i}.npy", mmap_mode="c")) for i, name in enumerate(wanted)}


class _Modules:
    def __init__(self) -> None:
        self.arrow = importlib.import_module("pyarrow")
        self.files = importlib.import_module("pyarrow.fs")
        self.parquet = importlib.import_module("pyarrow.parquet")


@dataclass(frozen=True)
class _Table:
    path: str
    files: Sequence[str]
    identity: Sequence[tuple[str, int, int]]
    system: Any
    schema: Any
    modules: _Modules

    @classmethod
    def find(cls, path: str, modules: _Modules) -> _Table:
        """Find the files and read the first one's schema."""
        try:
            if "://" in path:
                system, place = modules.files.FileSystem.from_uri(path)
            else:
                system, place = modules.files.LocalFileSystem(), os.path.abspath(path)
            found = system.get_file_info(place)
        except (OSError, modules.arrow.ArrowException) as problem:
            raise HvdTrainError(f"{path} cannot be read: {problem}") from None
        if found.type == modules.files.FileType.NotFound:
            raise FileNotFoundError(
                f"there is no {path} on host {os.uname().nodename}. Every rank reads the files itself: they must be in "
                "a file system that all hosts share, under the same path"
            )
        infos = [found]
        if found.type == modules.files.FileType.Directory:
            infos = _data_files(path, system.get_file_info(modules.files.FileSelector(place)))
        identity = [(info.path, int(info.size), int(info.mtime_ns or 0)) for info in infos]
        files = [info.path for info in infos]
        try:
            schema = modules.parquet.read_schema(files[0], filesystem=system)
        except modules.arrow.ArrowInvalid as problem:
            raise ValueError(f"{files[0]} is no Parquet file: {problem}") from None
        return cls(path, files, identity, system, schema, modules)

    def choose(self, columns: Columns | None, casts: Mapping[str, np.dtype[Any]]) -> dict[str, list[str]]:
        """Return {name of an array: its columns}, all there and of numbers.

        Raises:
            ValueError: see `read_parquet`.
        """
        there = list(self.schema.names)
        if isinstance(columns, str):
            columns = [columns]
        named = columns if isinstance(columns, Mapping) else {name: name for name in (columns or there)}
        wanted = {name: [each] if isinstance(each, str) else list(each) for name, each in named.items()}
        for column in [each for group in wanted.values() for each in group]:
            if column not in there:
                raise ValueError(f"{self.path} has no column {column!r}. It has: {', '.join(there)}")
            self._dtype(column, self.schema.field(column).type)
        for name in casts:
            if name not in wanted:
                raise ValueError(f"dtypes names {name!r}, which is none of the arrays: {', '.join(wanted)}")
        for name, group in wanted.items():
            types = {column: self._dtype(column, self.schema.field(column).type) for column in group}
            if len(set(types.values())) != 1 and not (types and name in casts):
                said = ", ".join(f"{column} {dtype}" for column, dtype in types.items()) or "no column"
                raise ValueError(
                    f"the array {name!r} takes columns of one type. Received: {said}. Give it one by dtypes, say "
                    f"{{{name!r}: 'float32'}}"
                )
        return wanted

    def _dtype(self, column: str, kind: Any) -> str:
        arrow = self.modules.arrow
        if arrow.types.is_list(kind) or arrow.types.is_large_list(kind) or arrow.types.is_fixed_size_list(kind):
            kind = kind.value_type
        if re.sub(r"\d+$", "", str(kind)) not in _NUMBERS:
            raise ValueError(f"column {column!r} of {self.path} is of {kind}: {_advice(kind, arrow)}")
        return str(np.dtype(kind.to_pandas_dtype()))

    def batches(self, columns: Sequence[str]) -> Iterator[tuple[str, int, Any]]:
        """Yield (file, its row that comes first, record batch)."""
        for path in self.files:
            row = 0
            try:
                with self.modules.parquet.ParquetFile(path, filesystem=self.system, pre_buffer=False) as file:
                    self._check_schema(path, file.schema_arrow, columns)
                    for batch in file.iter_batches(_BATCH_ROWS, columns=list(columns)):
                        yield path, row, batch
                        row += batch.num_rows
            except (OSError, self.modules.arrow.ArrowException) as problem:
                raise HvdTrainError(f"{path} cannot be read: {problem}") from None

    def _check_schema(self, path: str, schema: Any, columns: Sequence[str]) -> None:
        there = {field.name: field.type for field in schema}
        other = [name for name in columns if there.get(name) != self.schema.field(name).type]
        if other:
            raise ValueError(f"{path} has another schema than {self.files[0]}: see {', '.join(other)}")


def _data_files(path: str, infos: Sequence[Any]) -> list[Any]:
    """Return the Parquet files of a folder in order of their names."""
    names = {info.base_name for info in infos}
    folders = sorted(info.base_name for info in infos if "=" in info.base_name)
    if folders:
        raise ValueError(f"{path} is partitioned ({folders[0]}): its files lack a column. Write it without partitionBy")
    found = [info for info in infos if info.base_name.endswith(".parquet") and info.base_name[0] not in "._"]
    half = "_temporary" in names or ("_SUCCESS" not in names and any(_SPARKS.match(info.base_name) for info in found))
    if half:
        raise ValueError(
            f"{path} is half written: Spark's _SUCCESS is missing. Wait for the job that writes it, or write it again"
        )
    if not found:
        raise FileNotFoundError(f"{path} holds no *.parquet file. Received: {', '.join(sorted(names)) or 'nothing'}")
    return sorted(found, key=lambda info: str(info.base_name))


def _advice(kind: Any, arrow: Any) -> str:
    if arrow.types.is_struct(kind):
        return "ML vectors are written as lists by hvdtrain.integrations.spark.write_parquet; take others apart"
    if arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_dictionary(kind):
        return "a model takes numbers. Encode it, say by StringIndexer"
    return "an array takes numbers, or lists of numbers. Cast it, or leave it out of columns"


# ---- unpacking


def _unpack(
    table: _Table, wanted: Mapping[str, Sequence[str]], casts: Mapping[str, np.dtype[Any]], folder: Path
) -> None:
    """Write each array of `wanted` into `folder`, which is there only once it is whole."""
    columns = list(dict.fromkeys(each for group in wanted.values() for each in group))
    rows = 0
    making = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        with ExitStack() as stack:
            outputs = [_Output(making / f"{i}.npy", stack) for i in range(len(wanted))]
            for file, first, batch in table.batches(columns):
                arrays = {name: _as_array(batch.column(name), name, file, first) for name in columns}
                for output, (name, group) in zip(outputs, wanted.items(), strict=True):
                    array = _side_by_side([arrays[column] for column in group])
                    output.add(array.astype(casts.get(name, array.dtype), copy=False), f"{name!r} of {file}")
                rows += batch.num_rows
            if not rows:
                raise ValueError(f"{table.path} holds no samples. Received: {len(table.files)} files without rows")
            for output in outputs:
                output.finish(rows)
        making.rename(folder)
        table.modules.arrow.default_memory_pool().release_unused()  # what held row groups
    except OSError as problem:
        room = shutil.disk_usage(folder.parent).free / 2**30
        raise HvdTrainError(
            f"{table.path} cannot be unpacked into {folder.parent}, which has {room:.1f} GiB left: {problem}. Choose "
            "another disk of this host by cache_dir"
        ) from None
    finally:
        shutil.rmtree(making, ignore_errors=True)


class _Output:
    """One array on disk, written row by row: its shape is known at the end.

    Written, not mapped: a full disk is then an error, and not the end of the process.
    """

    _HEADER_BYTES = 256

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._file = stack.enter_context(path.open("wb"))
        self._file.seek(self._HEADER_BYTES)
        self._like: NDArray[Any] | None = None

    def add(self, array: NDArray[Any], what: str) -> None:
        if self._like is None and len(array):
            self._like = array[:0].copy()
        if self._like is not None and len(array) and self._like.shape[1:] != array.shape[1:]:
            lengths = [each.shape[1] for each in (self._like, array)]
            raise ValueError(f"lists of {what} have {lengths[1]} numbers, and {lengths[0]} before: pad or cut them")
        array.tofile(self._file)

    def finish(self, rows: int) -> None:
        assert self._like is not None
        header = {"descr": self._like.dtype.str, "fortran_order": False, "shape": (rows, *self._like.shape[1:])}
        text = repr(header).encode()
        # NumPy's format 1.0: magic, length of the header, the header with blanks and an end of line.
        start = b"\x93NUMPY\x01\x00" + (self._HEADER_BYTES - 10).to_bytes(2, "little")
        self._file.seek(0)
        self._file.write((start + text).ljust(self._HEADER_BYTES - 1) + b"\n")


def _as_array(column: Any, name: str, file: str, first: int) -> NDArray[Any]:
    """Return a column of a record batch: shape (rows,), or (rows, length) of lists.

    Raises:
        ValueError: a null, or lists of several lengths.
    """
    if column.null_count:
        row = first + int(np.flatnonzero(np.asarray(column.is_null()))[0])
        raise ValueError(f"column {name!r} is null in row {row} of {file}. Fill or drop such rows before")
    if not hasattr(column, "flatten"):
        return np.ascontiguousarray(column.to_numpy(zero_copy_only=False))
    values = column.flatten()
    if values.null_count:
        raise ValueError(f"a list in column {name!r} holds a null, below row {first} of {file}. Fill or drop such rows")
    if hasattr(column, "offsets"):
        lengths = np.diff(np.asarray(column.offsets))
        if len(lengths) and (odd := np.flatnonzero(lengths != lengths[0])).size:
            raise ValueError(
                f"lists of column {name!r} must have one length. Received: {lengths[0]} numbers in row {first} of "
                f"{file}, {lengths[odd[0]]} in row {first + odd[0]}. Pad or cut them before"
            )
    return np.ascontiguousarray(values.to_numpy(zero_copy_only=False).reshape(len(column), -1 if len(column) else 0))


def _side_by_side(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate([array if array.ndim > 1 else array[:, None] for array in arrays], axis=1)


# ---- the folder on local disk


def _cache(given: str | os.PathLike[str] | None) -> Path:
    folder = Path(given if given is not None else tempfile.gettempdir(), f"hvdtrain-parquet-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.lstat().st_uid
    except OSError as problem:
        raise HvdTrainError(f"{folder} cannot be made: {problem}. Choose another by cache_dir") from None
    if folder.is_symlink() or owner != os.getuid():
        raise HvdTrainError(f"{folder} is another user's, who could change what is read. Choose another by cache_dir")
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock of this host, which ends with its process.

    Raises:
        HvdTrainError: another process has held it for an hour.
    """
    until = time.monotonic() + _WAIT_S
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise HvdTrainError(
                        f"another process of this host has been unpacking for {_WAIT_S:.0f} s: see who holds {path}"
                    ) from None
                time.sleep(_POLL_S)
        yield


def _forget_unused(parent: Path) -> None:
    """Remove what nobody has read for long; who has it mapped keeps it."""
    for entry in parent.iterdir():
        try:
            if time.time() - entry.stat().st_mtime < _UNUSED_S:
                continue
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        except OSError:
            continue
