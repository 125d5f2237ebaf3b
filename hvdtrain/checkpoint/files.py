"""One checkpoint: a folder of arrays (safetensors) and JSON, hashed, free of pickle, and whole or not there.

A folder holds a .safetensors file for each group of arrays, meta.json, and manifest.json with every file's size and
sha256, written last. Nothing of it is parsed before its hash is found right.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.checkpoint import folders
from hvdtrain.checkpoint.array_file import (
    ArrayFile,
    FileEntry,
    Kind,
    OpenFile,
    StoredArrays,
    check_kinds,
    find_arrays,
    kind_of,
    sha256_of,
)
from hvdtrain.checkpoint.manifest import MANIFEST, META, Manifest, file_of, parse, render, stem_of
from hvdtrain.errors import CheckpointError
from hvdtrain.system import private_files
from hvdtrain.system.user_paths import expanded

Arrays = Mapping[str, NDArray[Any]]
Result = TypeVar("Result")

_MAX_BYTES = 1 << 20  # a manifest names a handful of files; more is damage, and not to be read into memory


@dataclass(frozen=True, eq=False)
class Contents:
    """The contents of a checkpoint."""

    arrays: Mapping[str, Arrays]  # groups of arrays by the stem of their file: "model" is model.safetensors
    meta: dict[str, Any]  # anything that JSON can say
    trained: frozenset[str] = frozenset()  # names in the group "model" of weights, where infinity counts
    # Arrays of "model" that are left out if they have this `digest`; it is then in meta["hashed"].
    left_out: dict[str, tuple[NDArray[Any], str]] = field(default_factory=dict)
    finite: bool = True  # of one that was read, whether training can resume from its numbers
    elsewhere: frozenset[str] = frozenset()  # names in `State.arrays` of what ranks keep in parts, in memory


class DiskError(CheckpointError):
    """A disk has not taken a checkpoint: it is full or read-only, or a quota is reached. A later one may succeed."""


def write(directory: str | os.PathLike[str], contents: Contents | Draft) -> None:
    """Write a checkpoint at `directory`, and replace one that is there; its arrays must not change meanwhile.

    If it cannot be written, a CheckpointError says why, and an older checkpoint at this path stays. It is a DiskError
    if the disk is the reason.
    """
    draft = contents if isinstance(contents, Draft) else Draft(directory, contents)
    try:
        draft.finish()
    finally:
        draft.close()


class Draft:
    """A checkpoint that is being written: some of its arrays by `put`, one by one, then the rest by `finish`.

    If `put` fails, it does nothing from then on, and `finish` raises. So a rank that gathers what it puts takes part in
    all collectives.

    Args:
        directory: see `write`.
        contents: all but the arrays that are put.
        awaited: the shapes and types of these, by group and name.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        contents: Contents,
        awaited: Mapping[str, Mapping[str, Kind]] | None = None,
    ) -> None:
        self._target = Path(os.path.realpath(expanded(directory)))
        self._contents, self._awaited = contents, awaited or {}
        self._stack = ExitStack()
        self._path: Path | None = None  # of the temporary folder
        self._files: dict[str, ArrayFile] = {}
        self._own: dict[str, Arrays] = {}  # arrays of the contents that are not written yet
        self._meta, self._num_bytes, self._finite = b"", 0, True
        self._error: Exception | None = None

    def put(self, stem: str, name: str, array: NDArray[Any]) -> None:
        """Write one of the awaited arrays. It may change afterwards."""
        with self._noted():
            self._begin()
            self._put(stem, name, array)

    def put_own(self) -> None:
        """Write the arrays of the contents. They may change afterwards."""
        with self._noted():
            self._begin()
            own, self._own = self._own, {}
            for stem, arrays in own.items():
                for name, array in arrays.items():
                    self._put(stem, name, array)

    def finish(self) -> None:
        """Complete the checkpoint, and put it in its place; raises what `write` raises."""
        self.put_own()
        try:
            if self._error is not None:
                raise self._error
            self._complete(self._begin())
        except OSError as error:
            space = folders.describe_space(self._target.parent, self._num_bytes)
            raise DiskError(
                f"Checkpoint {self._target} was not written: {error.strerror or error} ({space}). Older checkpoints "
                "are as they were."
            ) from error
        folders.clear_leftovers(self._target.parent, lambda name: name == self._target.name)

    def close(self) -> None:
        """Remove what is not in its place."""
        self._stack.close()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep the first error of the block for `finish`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - `finish` raises it
            self._error = self._error or error

    def _begin(self) -> Path:
        """Return the temporary folder. When it is first called, check the contents, then make the folder."""
        if self._error is not None:
            raise self._error
        if self._path is None:
            left_out = self._contents.left_out.items()
            same = {name: known for name, (array, known) in left_out if digest(array) == known}
            changed = {name: array for name, (array, _) in left_out if name not in same}
            groups = dict(self._contents.arrays)
            groups |= {"model": {**groups["model"], **changed}} if changed else {}
            kinds = {stem: {name: kind_of(a) for name, a in arrays.items()} for stem, arrays in groups.items()}
            kinds |= {stem: {**kinds.get(stem, {}), **awaited} for stem, awaited in self._awaited.items()}
            names = {stem: file_of(stem) for stem in kinds}
            for stem, each in kinds.items():
                check_kinds(stem, each)
            self._meta = self._rendered(self._contents.meta | ({"hashed": same} if same else {}))
            self._num_bytes = len(self._meta) + sum(k.nbytes for each in kinds.values() for k in each.values())
            folders.make(self._target.parent)
            _check_replaceable(self._target)
            path = self._stack.enter_context(folders.temporary(self._target))
            self._files = {stem: ArrayFile(path / name, kinds[stem]) for stem, name in names.items()}
            self._path, self._own = path, groups
        return self._path

    def _rendered(self, meta: dict[str, Any]) -> bytes:
        try:
            return json.dumps(meta).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"Checkpoint {self._target} was not written: its meta data is no JSON: {error}"
            ) from error

    def _put(self, stem: str, name: str, array: NDArray[Any]) -> None:
        self._files[stem].put(name, array)
        self._finite &= _can_resume_from(stem, name, array, self._contents.trained)

    def _complete(self, path: Path) -> None:
        entries = {META: _write_bytes(path / META, self._meta)}
        entries |= {file_of(stem): file.finish() for stem, file in self._files.items()}
        _write_bytes(path / MANIFEST, render(Manifest(entries, self._finite)))
        folders.put(path, self._target)


def digest(array: NDArray[Any]) -> str:
    """Return the sha256 of an array's type, shape and content."""
    found = hashlib.sha256(f"{array.dtype.name} {array.shape} ".encode())
    found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def read(directory: str | os.PathLike[str]) -> Contents:
    """Read a checkpoint and check all of it; CheckpointError if it is missing, damaged or of another format."""
    found = scan(directory)
    return replace(found, arrays={stem: dict(arrays.items()) for stem, arrays in found.arrays.items()})


def scan(directory: str | os.PathLike[str]) -> Contents:
    """Check all of a checkpoint, as `read` does, in the memory of one block; its arrays are `StoredArrays`.

    They are read when they are asked for, from the files that were checked, whatever takes their place.
    """

    def scan_all(folder: int) -> Contents:
        found, meta = _read_meta(folder)
        arrays = {
            stem: _scan_arrays(folder, name, entry)
            for name, entry in found.files.items()
            if (stem := stem_of(name)) is not None
        }
        known = found.finite
        return Contents(arrays, meta, finite=has_finite_numbers(arrays, frozenset()) if known is None else known)

    return _in_folder(directory, scan_all)


def read_meta(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a checkpoint's meta data alone, whatever the size of its arrays."""
    return _in_folder(directory, lambda folder: _read_meta(folder)[1])


def is_finite(directory: str | os.PathLike[str]) -> bool:
    """Return whether training can resume from a checkpoint's numbers; an older version's manifest does not say."""
    known = _in_folder(directory, lambda folder: _read_meta(folder)[0].finite)
    return scan(directory).finite if known is None else known


def has_finite_numbers(arrays: Mapping[str, Arrays], trained: frozenset[str]) -> bool:
    """Return whether training can resume from numbers; weights are named `trained`. See `_can_resume_from`."""
    return all(
        _can_resume_from(stem, name, array, trained) for stem, group in arrays.items() for name, array in group.items()
    )


def _can_resume_from(stem: str, name: str, array: NDArray[Any], trained: frozenset[str]) -> bool:
    """Return whether weights, named `trained`, are finite, and no buffer, statistic or optimizer state is NaN.

    A gradient in flight, or a velocity, must be finite: it changes weights later.

    Infinity counts in weights alone: masks (-inf) and observed ranges (inf, -inf) hold it by design. Running metrics
    may be NaN: the loss of a step that was skipped, for one.
    """
    if stem == "sync" or (stem == "model" and name in trained):
        return bool(np.isfinite(_ends(array)).all())
    is_statistic = stem == "ranks" and name.partition("/")[2].startswith("mean.")
    return not (stem in ("model", "optimizer") or is_statistic) or not np.isnan(_ends(array)).any()


def _ends(array: NDArray[Any]) -> NDArray[Any]:
    """Return the smallest and the largest number, through which NaN passes, without an array of flags."""
    if array.dtype.kind not in "fc" or not array.size:
        return np.zeros(2)
    parts = (array.real, array.imag) if array.dtype.kind == "c" else (array,)
    return np.array([end for part in parts for end in (part.min(), part.max())])


def _check_replaceable(target: Path) -> None:
    """Raise unless what is at `target` is a checkpoint, whole or not: never replace what another program put there."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise CheckpointError(f"Checkpoint {target} was not written: a file is in its place.")
    foreign = [name for name in os.listdir(target) if name not in (MANIFEST, META) and stem_of(name) is None]
    try:
        if foreign:
            read_meta(target)
    except CheckpointError:
        raise CheckpointError(
            f"Checkpoint {target} was not written: that folder is not a checkpoint, it contains {min(foreign)!r}. "
            "Name another folder."
        ) from None


def _write_bytes(path: Path, content: bytes) -> FileEntry:
    with private_files.open_file(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(len(content), hashlib.sha256(content).hexdigest())


def _in_folder(directory: str | os.PathLike[str], action: Callable[[int], Result]) -> Result:
    """Call `action` with the open folder: a rename meanwhile does not mix two checkpoints' files."""
    place = expanded(directory)
    while True:
        found = folders.locate(place)
        try:
            with folders.opened(found) as folder:
                try:
                    return action(folder)
                except CheckpointError as error:
                    # Compare while it is open: once it is removed and closed, the next folder may get its inode number.
                    if not _is_elsewhere(place, os.fstat(folder)):
                        raise CheckpointError(f"Checkpoint {directory} cannot be used: {error}.") from error
        except OSError as error:
            now = folders.locate(place)
            if not isinstance(error, FileNotFoundError) or (now == found and not now.is_dir()):
                raise CheckpointError(f"Checkpoint {directory} cannot be used: {error.strerror}.") from error
        # Its writer has put the next one in its place meanwhile: look again.


def _is_elsewhere(directory: Path, seen: os.stat_result) -> bool:
    """Return whether the checkpoint is no longer the folder that was seen."""
    try:
        return not os.path.samestat(os.stat(folders.locate(directory)), seen)
    except OSError:
        return True  # it was moved just now: check again


def _read_meta(folder: int) -> tuple[Manifest, dict[str, Any]]:
    found = parse(_read_file(folder, MANIFEST, None))
    content = _read_file(folder, META, found.files[META])
    try:
        meta = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{META} is no JSON: {error}") from error
    if not isinstance(meta, dict):
        raise CheckpointError(f"{META} holds {type(meta).__name__}, not an object")
    return found, meta


def _read_file(folder: int, name: str, entry: FileEntry | None) -> bytes:
    """Return a file's content; with an entry, only if it is what the manifest says."""
    with _opened(folder, name, entry) as file:
        return file.read()


def _scan_arrays(folder: int, name: str, entry: FileEntry) -> StoredArrays:
    """Return the arrays of a file, if it is what the manifest says."""
    with _opened(folder, name, entry) as file:
        return find_arrays(OpenFile(file.fileno(), name), entry.size)


@contextmanager
def _opened(folder: int, name: str, entry: FileEntry | None) -> Iterator[IO[bytes]]:
    """Open a file, and check it; with an entry, only if it is what the manifest says."""
    try:
        # A symlink may lead anywhere, and opening a pipe may never return.
        with folders.opened(name, os.O_NOFOLLOW | os.O_NONBLOCK, folder) as descriptor:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{name} is not a file")
            if entry is None and status.st_size > _MAX_BYTES:
                raise CheckpointError(f"{name} is damaged: it has {status.st_size} bytes")
            if entry is not None and entry.size != status.st_size:
                raise CheckpointError(f"{name} is damaged: it has {status.st_size} bytes instead of {entry.size}")
            with open(descriptor, "rb", closefd=False) as file:
                if entry is not None and sha256_of(file) != entry.sha256:
                    raise CheckpointError(f"{name} is damaged: it does not match its sha256 in {MANIFEST}")
                file.seek(0)
                yield file
    except OSError as error:
        what = "is a symlink" if error.errno == errno.ELOOP else f"cannot be read ({error.strerror})"
        raise CheckpointError(f"{name} {what}") from error
