"""Atomic, hashed, pickle-free checkpoints: arrays by name plus JSON. Knows nothing of frameworks or ranks.

A checkpoint is a folder: arrays.safetensors, meta.json, and manifest.json with the sha256 of both, written last. It is
written beside its place under a temporary name and renamed once complete, so a folder with its final name is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import CheckpointError

FORMAT = 1
_FILES = ("arrays.safetensors", "meta.json")
_EPOCH_NAME = re.compile(r"epoch-(\d{6,})")

Arrays = dict[str, NDArray[Any]]


def save(directory: str | os.PathLike[str], arrays: Arrays, meta: dict[str, Any]) -> None:
    """Write a checkpoint at `directory`, replacing one that is there.

    Raises:
        CheckpointError: the disk is full, the folder is read-only, ...; an older checkpoint there is kept.
    """
    # Not at the top: only those who save or load need it.
    from safetensors.numpy import save as to_safetensors

    target = Path(directory)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _beside(target)
        try:
            contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
            contents = (to_safetensors(contiguous), json.dumps(meta).encode())
            for name, content in zip(_FILES, contents, strict=True):
                _write(temporary / name, content)
            hashes = {name: hashlib.sha256(content).hexdigest() for name, content in zip(_FILES, contents, strict=True)}
            _write(temporary / "manifest.json", json.dumps({"format": FORMAT, "sha256": hashes}).encode())
            _replace(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"Checkpoint {target} could not be written: {error}. Nothing else was changed."
        ) from error


def load(directory: str | os.PathLike[str]) -> tuple[Arrays, dict[str, Any]]:
    """Read a checkpoint back: (arrays, meta).

    Raises:
        CheckpointError: it is missing, incomplete, damaged, or of a newer format.
    """
    from safetensors.numpy import load as from_safetensors

    source = Path(directory)
    try:
        manifest = json.loads((source / "manifest.json").read_bytes())
        if manifest["format"] > FORMAT:
            raise CheckpointError(
                f"Checkpoint {source} has format {manifest['format']}, this hvdtrain reads up to {FORMAT}: update it."
            )
        contents = [(source / name).read_bytes() for name in _FILES]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"Checkpoint {source} is missing or incomplete: {error!r}") from error
    for name, content in zip(_FILES, contents, strict=True):
        if hashlib.sha256(content).hexdigest() != manifest["sha256"].get(name):
            raise CheckpointError(f"Checkpoint {source} is damaged: {name} does not match its sha256 in manifest.json.")
    return from_safetensors(contents[0]), json.loads(contents[1])


def epoch_directory(root: str | os.PathLike[str], epochs_done: int) -> Path:
    """Return where the checkpoint after `epochs_done` epochs belongs."""
    return Path(root) / f"epoch-{epochs_done:06d}"


def newest_first(root: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the epoch checkpoints under `root`, the newest first; whether they are whole, `load` tells."""
    if Path(root).is_dir():
        found = {int(match[1]): path for path in Path(root).iterdir() if (match := _EPOCH_NAME.fullmatch(path.name))}
        for epoch in sorted(found, reverse=True):
            yield found[epoch]


def set_aside(root: str | os.PathLike[str]) -> Path | None:
    """Move the epoch checkpoints under `root` into a folder of their own; return it, or None where there were none."""
    found = list(newest_first(root))
    if not found:
        return None
    number = 1
    while (aside := Path(root) / f"old-{number}").exists():
        number += 1
    aside.mkdir()
    for path in found:
        path.rename(aside / path.name)
    return aside


def _beside(target: Path) -> Path:
    """Make an empty folder beside `target`, with the permissions that the user's umask gives."""
    path = target.parent / f".{target.name}-{uuid.uuid4().hex[:12]}"
    path.mkdir()
    return path


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _replace(temporary: Path, target: Path) -> None:
    """Put a complete folder in its place; the rename lasts once the parent folder is synced."""
    _sync_folder(temporary)
    if target.exists():
        # A folder cannot be renamed over one that holds files: move the old one aside, and drop it afterwards.
        aside = _beside(target)
        target.rename(aside / "old")
        temporary.rename(target)
        shutil.rmtree(aside)
    else:
        temporary.rename(target)
    _sync_folder(target.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
