"""One checkpoint: a folder of arrays (safetensors) and JSON, hashed, free of pickle, and whole or not there.

A folder holds a .safetensors file for each group of arrays, meta.json, and manifest.json with every file's size and
sha256, written last. Nothing of it is parsed before its hash is found right.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.checkpoint import folders
from hvdtrain.errors import CheckpointError
from hvdtrain.system import private_files, safe_arrays
from hvdtrain.system.user_paths import expanded

Arrays = dict[str, NDArray[Any]]
Result = TypeVar("Result")

_FORMAT = 2
_MANIFEST, _META, _SUFFIX = "manifest.json", "meta.json", ".safetensors"
_MAX_BYTES = 1 << 20  # a manifest names a handful of files; more is damage, and not to be read into memory
_PIECE_BYTES = 1 << 20
_STEM = re.compile(r"[a-z][a-z0-9_-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# The digest covers every byte before it, so that no flipped bit goes unseen; a later format must end the same way.
_OWN_DIGEST = re.compile(rb'(?P<body>.*), "sha256": "(?P<digest>[0-9a-f]{64})"}\n', re.DOTALL)
# What `safe_arrays` and safetensors read back into numpy: bfloat16, for one, it writes and then cannot read.
_DTYPES = frozenset(
    ["bool", "complex64", "complex128", "float16", "float32", "float64"]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
)


@dataclass(frozen=True, eq=False)
class Contents:
    """The contents of a checkpoint."""

    arrays: dict[str, Arrays]  # groups of arrays by the stem of their file: "model" is model.safetensors
    meta: dict[str, Any]  # anything that JSON can say
    trained: frozenset[str] = frozenset()  # names in the group "model" of weights, where infinity counts
    # Arrays of "model" that are left out if they have this `digest`; it is then in meta["hashed"].
    left_out: dict[str, tuple[NDArray[Any], str]] = field(default_factory=dict)
    finite: bool = True  # of one that was read, whether training can resume from its numbers


class DiskError(CheckpointError):
    """A disk has not taken a checkpoint: it is full or read-only, or a quota is reached. A later one may succeed."""


class FileEntry(NamedTuple):
    """One file of a checkpoint."""

    size: int
    sha256: str


class Manifest(NamedTuple):
    """The contents of a manifest."""

    files: dict[str, FileEntry]  # by name
    finite: bool | None  # whether training can resume from its numbers; None in older manifests, which do not say


def write(directory: str | os.PathLike[str], contents: Contents) -> None:
    """Write a checkpoint at `directory`, and replace one that is there; its arrays must not change meanwhile.

    If it cannot be written, a CheckpointError says why, and an older checkpoint at this path stays. It is a DiskError
    if the disk is the reason.
    """
    target = Path(os.path.realpath(expanded(directory)))
    same = {name: known for name, (array, known) in contents.left_out.items() if digest(array) == known}
    changed = {name: array for name, (array, _) in contents.left_out.items() if name not in same}
    groups = contents.arrays | ({"model": contents.arrays["model"] | changed} if changed else {})
    files = {_file_of(stem): _writable(stem, arrays) for stem, arrays in groups.items()}
    try:
        meta = json.dumps(contents.meta | ({"hashed": same} if same else {})).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"Checkpoint {target} was not written: its meta data is no JSON: {error}") from error
    from safetensors import SafetensorError  # not at the top: needed only to read or write

    try:
        folders.make(target.parent)
        _check_replaceable(target)
        with folders.temporary(target) as temporary:
            entries = {_META: _write_bytes(temporary / _META, meta)}
            for name, arrays in files.items():
                entries[name] = _write_arrays(temporary / name, arrays, like=temporary / _META)
            found = Manifest(entries, has_finite_numbers(groups, contents.trained))
            _write_bytes(temporary / _MANIFEST, render(found))
            folders.put(temporary, target)
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        num_bytes = len(meta) + sum(array.nbytes for arrays in groups.values() for array in arrays.values())
        space = folders.describe_space(target.parent, num_bytes)
        raise DiskError(
            f"Checkpoint {target} was not written: {why} ({space}). Older checkpoints are as they were."
        ) from error
    folders.clear_leftovers(target.parent, lambda name: name == target.name)


def digest(array: NDArray[Any]) -> str:
    """Return the sha256 of an array's type, shape and content."""
    found = hashlib.sha256(f"{array.dtype.name} {array.shape} ".encode())
    found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def read(directory: str | os.PathLike[str]) -> Contents:
    """Read a checkpoint and check all of it; CheckpointError if it is missing, damaged or of another format."""

    def read_all(folder: int) -> Contents:
        found, meta = _read_meta(folder)
        arrays = {
            stem: _parse_arrays(name, _read_file(folder, name, entry))
            for name, entry in found.files.items()
            if (stem := _stem_of(name)) is not None
        }
        known = found.finite
        return Contents(arrays, meta, finite=has_finite_numbers(arrays, frozenset()) if known is None else known)

    return _in_folder(directory, read_all)


def read_meta(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a checkpoint's meta data alone, whatever the size of its arrays."""
    return _in_folder(directory, lambda folder: _read_meta(folder)[1])


def is_finite(directory: str | os.PathLike[str]) -> bool:
    """Return whether training can resume from a checkpoint's numbers; an older version's manifest does not say."""
    known = _in_folder(directory, lambda folder: _read_meta(folder)[0].finite)
    return read(directory).finite if known is None else known


def has_finite_numbers(arrays: dict[str, Arrays], trained: frozenset[str]) -> bool:
    """Return whether weights, named `trained`, are finite, and no buffer, statistic or optimizer state is NaN.

    A gradient in flight, or a velocity, must be finite: it changes weights later.

    Infinity counts in weights alone: masks (-inf) and observed ranges (inf, -inf) hold it by design. Running metrics
    may be NaN: the loss of a step that was skipped, for one.
    """
    model, optimizer = arrays.get("model", {}), arrays.get("optimizer", {})
    weights = [array for name, array in model.items() if name in trained]
    if not all(np.isfinite(_ends(array)).all() for array in [*weights, *arrays.get("sync", {}).values()]):
        return False
    ranks = arrays.get("ranks", {}).items()
    statistics = [array for name, array in ranks if name.partition("/")[2].startswith("mean.")]
    return not any(np.isnan(_ends(array)).any() for array in [*model.values(), *optimizer.values(), *statistics])


def _ends(array: NDArray[Any]) -> NDArray[Any]:
    """Return the smallest and the largest number, through which NaN passes, without an array of flags."""
    if array.dtype.kind not in "fc" or not array.size:
        return np.zeros(2)
    parts = (array.real, array.imag) if array.dtype.kind == "c" else (array,)
    return np.array([end for part in parts for end in (part.min(), part.max())])


def _writable(stem: str, arrays: Arrays) -> Arrays:
    """Return the arrays as safetensors wants them, or raise before anything is written."""
    for name, array in arrays.items():
        if array.dtype.name not in _DTYPES:
            raise CheckpointError(f"Array {name!r} of {stem} has dtype {array.dtype}, which no checkpoint can hold.")
    if "__metadata__" in arrays:
        raise CheckpointError(f"Array '__metadata__' of {stem} has a name that safetensors reserves.")
    return safe_arrays.encoded(arrays)


def _check_replaceable(target: Path) -> None:
    """Raise unless what is at `target` is a checkpoint, whole or not: never replace what another program put there."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise CheckpointError(f"Checkpoint {target} was not written: a file is in its place.")
    foreign = [name for name in os.listdir(target) if name not in (_MANIFEST, _META) and _stem_of(name) is None]
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


def _write_arrays(path: Path, arrays: Arrays, *, like: Path) -> FileEntry:
    """Write and hash arrays without a second copy of them in memory, and without holding up other threads."""
    from safetensors.numpy import save_file

    save_file(arrays, path)
    path.chmod(like.stat().st_mode)  # safetensors makes it the owner's alone, shared or not
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
        os.fsync(file.fileno())
        return FileEntry(file.tell(), digest.hexdigest())


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
    found = parse(_read_file(folder, _MANIFEST, None))
    content = _read_file(folder, _META, found.files[_META])
    try:
        meta = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{_META} is no JSON: {error}") from error
    if not isinstance(meta, dict):
        raise CheckpointError(f"{_META} holds {type(meta).__name__}, not an object")
    return found, meta


def _read_file(folder: int, name: str, entry: FileEntry | None) -> bytes:
    """Return a file's content; with an entry, only if it is what the manifest says."""
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
                content = file.read()
    except OSError as error:
        what = "is a symlink" if error.errno == errno.ELOOP else f"cannot be read ({error.strerror})"
        raise CheckpointError(f"{name} {what}") from error
    if entry is not None and hashlib.sha256(content).hexdigest() != entry.sha256:
        raise CheckpointError(f"{name} is damaged: it does not match its sha256 in {_MANIFEST}")
    return content


def _parse_arrays(name: str, content: bytes) -> Arrays:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return safe_arrays.decoded(load(content))
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        # Its hash is right, so it was written like this.
        raise CheckpointError(f"{name} is no safetensors file that numpy can hold: {error!r}") from error


def _file_of(stem: str) -> str:
    """Return the file name of the arrays under `stem`, a plain lower-case name."""
    if not _STEM.fullmatch(stem):
        raise ValueError(
            f"a group of arrays must have a name of lower-case letters, digits, - and _. Received: {stem!r}"
        )
    return stem + _SUFFIX


def _stem_of(name: str) -> str | None:
    """Return what `_file_of` was given for this file name; None where it cannot have been made by it."""
    stem = name.removesuffix(_SUFFIX)
    return stem if stem != name and _STEM.fullmatch(stem) else None


def render(manifest: Manifest) -> bytes:
    """Return the manifest as a file's content."""
    files = {name: entry._asdict() for name, entry in manifest.files.items()}
    finite = {} if manifest.finite is None else {"finite": manifest.finite}
    body = json.dumps({"format": _FORMAT, **finite, "files": files})[:-1].encode()
    return body + f', "sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def parse(content: bytes) -> Manifest:
    """Return what a manifest says; CheckpointError if it is damaged, of another format, or names any other file."""
    signed = _OWN_DIGEST.fullmatch(content)
    if signed and hashlib.sha256(signed["body"]).hexdigest().encode() != signed["digest"]:
        raise CheckpointError(f"{_MANIFEST} does not match its own sha256: it is damaged")
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{_MANIFEST} is damaged: {error}") from None
    number = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(number, int) and number > _FORMAT:
        raise CheckpointError(f"it has format {number}, this hvdtrain reads up to {_FORMAT}: update hvdtrain")
    if signed and number == _FORMAT:
        finite = manifest.get("finite")
        return Manifest(_entries(manifest.get("files")), finite if isinstance(finite, bool) else None)
    raise CheckpointError(f"{_MANIFEST} is damaged: its format is {number!r}, or its own sha256 is missing")


def _entries(files: Any) -> dict[str, FileEntry]:
    if not isinstance(files, dict) or _META not in files:
        raise CheckpointError(f"{_MANIFEST} is damaged: it does not name {_META}")
    entries = {}
    for name, entry in files.items():
        # A name is opened as a file: one such as "../x" must not lead out of the folder.
        if name != _META and _stem_of(name) is None:
            raise CheckpointError(f"{_MANIFEST} names {name!r}, which is no file of a checkpoint")
        size, sha256 = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or size < 0 or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise CheckpointError(f"{_MANIFEST} is damaged: its entry of {name} is {entry!r}")
        entries[name] = FileEntry(size, sha256)
    return entries
