"""The manifest of a checkpoint: its files, with their sizes and hashes, and a hash of itself."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, NamedTuple

from hvdtrain.checkpoint.array_file import FileEntry
from hvdtrain.errors import CheckpointError

MANIFEST, META = "manifest.json", "meta.json"
_FORMAT = 2
_SUFFIX = ".safetensors"
_STEM = re.compile(r"[a-z][a-z0-9_-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# The digest covers every byte before it, so that no flipped bit goes unseen; a later format must end the same way.
_OWN_DIGEST = re.compile(rb'(?P<body>.*), "sha256": "(?P<digest>[0-9a-f]{64})"}\n', re.DOTALL)


class Manifest(NamedTuple):
    """The contents of a manifest."""

    files: dict[str, FileEntry]  # by name
    finite: bool | None  # whether training can resume from its numbers; None in older manifests, which do not say


def file_of(stem: str) -> str:
    """Return the file name of the arrays under `stem`, a plain lower-case name."""
    if not _STEM.fullmatch(stem):
        raise ValueError(
            f"a group of arrays must have a name of lower-case letters, digits, - and _. Received: {stem!r}"
        )
    return stem + _SUFFIX


def stem_of(name: str) -> str | None:
    """Return what `file_of` was given for this file name; None where it cannot have been made by it."""
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
        raise CheckpointError(f"{MANIFEST} does not match its own sha256: it is damaged")
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged: {error}") from None
    number = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(number, int) and number > _FORMAT:
        raise CheckpointError(f"it has format {number}, this hvdtrain reads up to {_FORMAT}: update hvdtrain")
    if signed and number == _FORMAT:
        finite = manifest.get("finite")
        return Manifest(_entries(manifest.get("files")), finite if isinstance(finite, bool) else None)
    raise CheckpointError(f"{MANIFEST} is damaged: its format is {number!r}, or its own sha256 is missing")


def _entries(files: Any) -> dict[str, FileEntry]:
    if not isinstance(files, dict) or META not in files:
        raise CheckpointError(f"{MANIFEST} is damaged: it does not name {META}")
    entries = {}
    for name, entry in files.items():
        # A name is opened as a file: one such as "../x" must not lead out of the folder.
        if name != META and stem_of(name) is None:
            raise CheckpointError(f"{MANIFEST} names {name!r}, which is no file of a checkpoint")
        size, sha256 = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or size < 0 or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise CheckpointError(f"{MANIFEST} is damaged: its entry of {name} is {entry!r}")
        entries[name] = FileEntry(size, sha256)
    return entries
