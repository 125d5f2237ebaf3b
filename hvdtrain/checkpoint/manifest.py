"""What a checkpoint consists of: file names, sizes and hashes, under a digest of the manifest's own."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import CheckpointError

FORMAT = 2
NAME = "manifest.json"
META = "meta.json"
SUFFIX = ".safetensors"
MAX_BYTES = 1 << 20  # a manifest names a handful of files; more is damage, and not to be read into memory

_STEM = re.compile(r"[a-z][a-z0-9_-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# The digest covers every byte before it, so that no flipped bit goes unseen; a later format must end the same way.
_OWN_DIGEST = re.compile(rb'(?P<body>.*), "sha256": "(?P<digest>[0-9a-f]{64})"}\n', re.DOTALL)


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint; a size of -1 is unknown (format 1)."""

    size: int
    sha256: str


def file_of(stem: str) -> str:
    """Return the file name of the arrays under `stem`, a plain lower-case name."""
    if not _STEM.fullmatch(stem):
        raise ValueError(
            f"a group of arrays must have a name of lower-case letters, digits, - and _. Received: {stem!r}"
        )
    return stem + SUFFIX


def stem_of(name: str) -> str | None:
    """Return what `file_of` was given for this file name; None where it cannot have been made by it."""
    stem = name.removesuffix(SUFFIX)
    return stem if stem != name and _STEM.fullmatch(stem) else None


@dataclass(frozen=True)
class Manifest:
    """What a manifest says."""

    files: dict[str, FileEntry]  # by name
    finite: bool | None  # whether training can resume from its numbers; None in older manifests, which do not say


def render(manifest: Manifest) -> bytes:
    """Return the manifest as a file's content."""
    files = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in manifest.files.items()}
    finite = {} if manifest.finite is None else {"finite": manifest.finite}
    body = json.dumps({"format": FORMAT, **finite, "files": files})[:-1].encode()
    return body + f', "sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def parse(content: bytes) -> Manifest:
    """Return what a manifest says; CheckpointError if it is damaged, of another format, or names any other file."""
    signed = _OWN_DIGEST.fullmatch(content)
    if signed and hashlib.sha256(signed["body"]).hexdigest().encode() != signed["digest"]:
        raise CheckpointError(f"{NAME} does not match its own sha256: it is damaged")
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{NAME} is damaged: {error}") from None
    number = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(number, int) and number > FORMAT:
        raise CheckpointError(f"it has format {number}, this hvdtrain reads up to {FORMAT}: update hvdtrain")
    if signed and number == FORMAT:
        finite = manifest.get("finite")
        return Manifest(_entries(manifest.get("files")), finite if isinstance(finite, bool) else None)
    raise CheckpointError(f"{NAME} is damaged: its format is {number!r}, or its own sha256 is missing")


def _entries(files: Any) -> dict[str, FileEntry]:
    if not isinstance(files, dict) or META not in files:
        raise CheckpointError(f"{NAME} is damaged: it does not name {META}")
    entries = {}
    for name, entry in files.items():
        # A name is opened as a file: one such as "../x" must not lead out of the folder.
        if name != META and stem_of(name) is None:
            raise CheckpointError(f"{NAME} names {name!r}, which is no file of a checkpoint")
        size, sha256 = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or size < 0 or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise CheckpointError(f"{NAME} is damaged: its entry of {name} is {entry!r}")
        entries[name] = FileEntry(size, sha256)
    return entries
