"""Parquet files as memory-mapped arrays.

Parquet compresses row groups, so to read one row is to unpack thousands, and a shuffled epoch reads rows in any order.
Therefore the first process of a host that reads a table unpacks it once, batch by batch, into plain arrays on local
disk. All processes of the host map these files and share the system's page cache.
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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hvdtrain.errors import HvdTrainError, PackageMissingError
from hvdtrain.system.user_paths import expanded

Columns = Sequence[str] | Mapping[str, str | Sequence[str]]

_BATCH_ROWS = 2**14
_FORMAT = 2  # of the unpacked files; part of the folder's name
_INDEX = "arrays.json"  # [type, shape] of each array
_UNUSED_S = 7 * 24 * 3600.0
_WAIT_S = 3600.0
_POLL_S = 0.1
_SPARK_PART = re.compile(r"part-\d{5}-[0-9a-f]{8}-")


def read_parquet(
    path: str | os.PathLike[str],
    columns: Columns | None = None,
    *,
    dtypes: Mapping[str, DTypeLike] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> dict[str, NDArray[Any]]:
    """Return columns of a Parquet file, or of a folder of them, as arrays: one row per sample, types preserved.

    A column of numbers has the shape (rows,), one of lists of one length (rows, length). Rows have the order of the
    files' names, and within a file its own, on every rank. The arrays are memory-mapped: rows are read when they are
    used, in any order. Every rank must see the Parquet files.

    Args:
        path: a file, a folder, or a URL such as s3://bucket/folder.
        columns: names; or {name of an array: a column, or several, side by side in one array of shape (rows, width)}.
            None for all columns.
        dtypes: {name of an array: its type}, such as float32 for a table's doubles; others keep theirs.
        cache_dir: where arrays are unpacked, on a disk of this host with room for them; by default in the folder for
            temporary files. Arrays that nobody has read for a week are removed.

    Raises:
        PackageMissingError: pyarrow is not installed.
        FileNotFoundError: there is no such file or folder here, or nothing in it.
        ValueError: a folder half written, a missing column, a column that is not of numbers, a null, lists of several
            lengths, or no rows.
        HvdTrainError: the files cannot be unpacked here.
    """
    table = _Table(os.fspath(path))
    casts = {name: np.dtype(each) for name, each in (dtypes or {}).items()}
    wanted = table.choose(columns, casts)
    written = {name: dtype.str for name, dtype in casts.items()}
    key = hashlib.sha256(json.dumps([_FORMAT, table.identity, wanted, written]).encode()).hexdigest()[:32]
    parent = _cache(cache_dir)
    folder = parent / key
    if not folder.is_dir():
        with _lock(parent / f"{key}.lock"):
            if not folder.is_dir():  # another process may have been first
                _remove_unused(parent)
                _unpack(table, wanted, casts, folder)
    os.utime(folder)
    kinds = json.loads((folder / _INDEX).read_text())
    # Mode "c": a page is copied when it is written to, so the data of other processes does not change.
    return {
        name: np.asarray(np.memmap(folder / str(i), dtype, "c", shape=tuple(shape)))
        for i, (name, (dtype, shape)) in enumerate(zip(wanted, kinds, strict=True))
    }


class _Table:
    """A Parquet file, or a folder of them; has the first file's schema."""

    def __init__(self, path: str) -> None:
        try:
            self._arrow, filesystems, self._parquet = map(
                importlib.import_module, ("pyarrow", "pyarrow.fs", "pyarrow.parquet")
            )
        except ImportError:
            raise PackageMissingError("pyarrow is not installed. Run: pip install pyarrow") from None
        self.path = path
        try:
            place = path if "://" in path else os.path.abspath(expanded(path))
            self._system, place = filesystems.FileSystem.from_uri(place)
            found = self._system.get_file_info(place)
        except (OSError, self._arrow.ArrowException) as problem:
            raise HvdTrainError(f"{path} cannot be read: {problem}") from None
        if found.type == filesystems.FileType.NotFound:
            raise FileNotFoundError(
                f"there is no {path} on host {os.uname().nodename}. Every rank reads the files itself: they must be in "
                "a file system that all hosts share, under the same path"
            )
        infos = [found]
        if found.type == filesystems.FileType.Directory:
            infos = _data_files(path, self._system.get_file_info(filesystems.FileSelector(place)))
        self.identity = [(info.path, int(info.size), int(info.mtime_ns or 0)) for info in infos]
        self.files = [info.path for info in infos]
        try:
            schema = self._parquet.read_schema(self.files[0], filesystem=self._system)
        except self._arrow.ArrowInvalid as problem:
            raise ValueError(f"{self.files[0]} is no Parquet file: {problem}") from None
        self._types = dict(zip(schema.names, schema.types, strict=True))

    def choose(self, columns: Columns | None, casts: Mapping[str, np.dtype[Any]]) -> dict[str, list[str]]:
        """Return {name of an array: its columns}, all of them in the table and of numbers."""
        if isinstance(columns, str):
            columns = [columns]
        named = columns if isinstance(columns, Mapping) else {name: name for name in (columns or self._types)}
        wanted = {name: [each] if isinstance(each, str) else list(each) for name, each in named.items()}
        for name in casts:
            if name not in wanted:
                raise ValueError(f"dtypes names {name!r}, which is none of the arrays: {', '.join(wanted)}")
        for name, group in wanted.items():
            types = {column: self._dtype(column) for column in group}
            if len(set(types.values())) != 1 and not (types and name in casts):
                received = ", ".join(f"{column} {dtype}" for column, dtype in types.items()) or "no column"
                raise ValueError(
                    f"the array {name!r} takes columns of one type. Received: {received}. Give it one by dtypes, say "
                    f"{{{name!r}: 'float32'}}"
                )
        return wanted

    def _dtype(self, column: str) -> str:
        if column not in self._types:
            raise ValueError(f"{self.path} has no column {column!r}. It has: {', '.join(self._types)}")
        kind, types = self._types[column], self._arrow.types
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            kind = kind.value_type
        if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
            return str(np.dtype(kind.to_pandas_dtype()))
        advice = "an array takes numbers, or lists of numbers. Cast it, or leave it out of columns"
        if types.is_struct(kind):
            advice = "ML vectors are written as lists by hvdtrain.integrations.spark.write_parquet; take others apart"
        elif types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind):
            advice = "a model takes numbers. Encode it, say by StringIndexer"
        raise ValueError(f"column {column!r} of {self.path} is of {kind}: {advice}")

    def batches(self, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, NDArray[Any]], str]]:
        """Yield (number of rows, {column: array}, file)."""
        for path in self.files:
            row = 0
            try:
                with self._parquet.ParquetFile(path, filesystem=self._system, pre_buffer=False) as file:
                    there = {field.name: field.type for field in file.schema_arrow}
                    other = [name for name in columns if there.get(name) != self._types[name]]
                    if other:
                        raise ValueError(f"{path} has another schema than {self.files[0]}: see {', '.join(other)}")
                    for batch in file.iter_batches(_BATCH_ROWS, columns=list(columns)):
                        arrays = {name: _array(batch.column(name), name, path, row) for name in columns}
                        yield batch.num_rows, arrays, path
                        row += batch.num_rows
            except (OSError, self._arrow.ArrowException) as problem:
                raise HvdTrainError(f"{path} cannot be read: {problem}") from None
        self._arrow.default_memory_pool().release_unused()  # memory of row groups


def _data_files(path: str, infos: Sequence[Any]) -> list[Any]:
    """Return the Parquet files of a folder in order of their names."""
    names = sorted(info.base_name for info in infos)
    partitions = [name for name in names if "=" in name]
    if partitions:
        raise ValueError(
            f"{path} is partitioned ({partitions[0]}): its files lack a column. Write it without partitionBy"
        )
    found = [info for info in infos if info.base_name.endswith(".parquet") and info.base_name[0] not in "._"]
    by_spark = any(_SPARK_PART.match(info.base_name) for info in found)
    if "_temporary" in names or ("_SUCCESS" not in names and by_spark):
        raise ValueError(
            f"{path} is half written: Spark's _SUCCESS is missing. Wait for the job that writes it, or write it again"
        )
    if not found:
        raise FileNotFoundError(f"{path} holds no *.parquet file. Received: {', '.join(names) or 'nothing'}")
    return sorted(found, key=lambda info: str(info.base_name))


def _unpack(
    table: _Table, wanted: Mapping[str, Sequence[str]], casts: Mapping[str, np.dtype[Any]], folder: Path
) -> None:
    """Write each array of `wanted` into `folder`, which appears only once it is whole."""
    columns = list(dict.fromkeys(each for group in wanted.values() for each in group))
    rows, kinds = 0, dict[str, tuple[str, tuple[int, ...]]]()  # type and shape of a row, by array
    making = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        with ExitStack() as stack:
            # Written, not mapped: a full disk is then an error, and does not kill the process.
            outputs = [stack.enter_context((making / str(i)).open("wb")) for i in range(len(wanted))]
            for num_rows, arrays, file in table.batches(columns):
                if not num_rows:
                    continue
                rows += num_rows
                for output, (name, group) in zip(outputs, wanted.items(), strict=True):
                    array = _side_by_side([arrays[column] for column in group])
                    array = array.astype(casts.get(name, array.dtype), copy=False)
                    _, shape = kinds.setdefault(name, (array.dtype.str, array.shape[1:]))
                    if shape != array.shape[1:]:
                        raise ValueError(
                            f"lists of {name!r} of {file} have {array.shape[1]} numbers, and {shape[0]} before: pad or "
                            "cut them"
                        )
                    array.tofile(output)
        if not rows:
            raise ValueError(f"{table.path} holds no samples. Received: {len(table.files)} files without rows")
        index = [(dtype, (rows, *shape)) for dtype, shape in (kinds[name] for name in wanted)]
        (making / _INDEX).write_text(json.dumps(index))
        making.rename(folder)
    except OSError as problem:
        room = shutil.disk_usage(folder.parent).free / 2**30
        raise HvdTrainError(
            f"{table.path} cannot be unpacked into {folder.parent}, which has {room:.1f} GiB left: {problem}. Choose "
            "another disk of this host by cache_dir"
        ) from None
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _array(column: Any, name: str, file: str, first: int) -> NDArray[Any]:
    """Return a column of a record batch: shape (rows,), or (rows, length) of lists."""
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


def _cache(given: str | os.PathLike[str] | None) -> Path:
    folder = expanded(given if given is not None else tempfile.gettempdir()) / f"hvdtrain-parquet-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.lstat().st_uid
    except OSError as problem:
        raise HvdTrainError(f"{folder} cannot be made: {problem}. Choose another folder with cache_dir") from None
    if folder.is_symlink() or owner != os.getuid():
        raise HvdTrainError(f"{folder} is another user's, who could change the data. Choose another with cache_dir")
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock on this host; it ends with this process."""
    until = time.monotonic() + _WAIT_S
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise HvdTrainError(
                        f"another process of this host has been unpacking for {_WAIT_S:.0f} s and holds {path}"
                    ) from None
                time.sleep(_POLL_S)
        yield


def _remove_unused(parent: Path) -> None:
    """Remove data that was not read for a week. A process that has mapped it can still read it."""
    for entry in parent.iterdir():
        with suppress(OSError):
            if time.time() - entry.stat().st_mtime >= _UNUSED_S:
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink()
